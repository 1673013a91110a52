"""What the embedding tiers cost: hits, SSD misses, a table far larger than its RAM, growth, live updates.

    python -m experiments.tiers hits misses growth big updates served --rows 50000000 --repo model_repository

hits, misses, growth, big, updates   the bare look-up of 256 keys, against what the same machine does without the tiers
kernel                               requests to `--repo` in this process, its item ids a table far larger than its RAM
large                                the same, by real servers that take turns
served                               `recommend` and `rank` of a real server on `--repo`, while rows are updated

Tables of `--rows` rows x 16 and less lie in `--folder`, written once (50,000,000 rows: 7 GB, a few minutes). What is compared
takes turns, because other work on a machine only ever adds time. In the end every figure stands beside its bound (`bounds.py`);
the exit code is 1 when one is missed. The last line of stdout is a single compact JSON document.

`make bounds-tiers` runs all parts, on 50,000,000 rows, over a repository with tables of 16 (wide.toml).
"""
