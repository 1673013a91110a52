"""A part of the pipeline by itself, in this process, without a server.

python -m experiments.parts.preprocess       the compiled plan against the NVTabular workflow that it was compiled from
python -m experiments.parts.rules            the rules, each alone and all together
python -m experiments.parts.cache_policy     hit rates of the embedding tiers' cache against LRU
"""
