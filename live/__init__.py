"""The shop's side of the live store: look into it, archive its log, check it by replay, erase a user, back it up.

python -m live inspect | replay | compact | maintain | consume | share | export | erase | forget | backup | restore

<REPO>.live/            the store (serving/live)
<REPO>.live/archive/    closed segments of the log, Parquet: events-<first sequence>-<last sequence>.parquet
"""
