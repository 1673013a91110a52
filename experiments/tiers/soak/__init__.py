"""Embedding tiers under updates, evictions and SIGKILL: nothing may be torn, mixed up or lost.

    python -m experiments.tiers.soak [--seconds 600] [--instances 3] [--rows 20000]

Every few seconds an instance or the updater is killed and started again. Instances look rows up and check each answer: a row's
first column is its key, all others its version. A row is wrong when it is

    foreign   of another key, or a default: every key has a row
    torn      of two versions
    early     newer than what is being published
    stale     older than what the updater had applied last when the look-up began: the update ring tells
    fallen    older than what the same process was given before
    late      older than what was acknowledged VISIBLE_WITHIN_S before, the updater up since RESTARTED_WITHIN_S
    lost      in the end, when all is quiet, not the version acknowledged last

Wrong rows of look-ups that were marked `degraded` are wrong all the same, and counted apart as well.

Says on stderr how it goes, every 30 s, and the first wrong rows. Ends with one line of JSON; exit code 1 when anything was
wrong.
"""
