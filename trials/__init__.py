"""Decide whether one generation is better than another, from logs of what was shown and what users did.

feedback.py      the log of answers (live/exposures.py) joined with events: clicks, conversions, values
shown.py         the same of a log of any size, part by part
report.py        what users did, by generation, arm, position and category
judged.py        the answers and events of the running experiment, read on from the last look
progress.py      how an experiment goes: arms, the interval over time, the decision
sequential.py    A/B tests that may be looked at any time: confidence sequences, sample-ratio test
split.py         the answers that can be compared, and whether the arms have the users that they should
harm.py          what counts as harm by a challenger
guard.py         ends the running experiment: rolls back, promotes or stops
interleaving.py  two generations inside one answer: team draft and its credit
off_policy.py    the value of a policy that nobody was shown, from the log of another: IPS, SNIPS, DR; also of slates
unseen.py        the same for a generation, from the exposure log
calibration.py   whether scores still promise the clicks that they get
drift.py         whether features and scores still come from the distribution that the export saw: PSI, KL, bands

Nothing here needs a server, and every random draw has a seed.
"""
