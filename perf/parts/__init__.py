"""A part of the pipeline by itself, in this process, without a server.

python -m perf.parts.preprocess       the compiled plan against the NVTabular workflow that it was compiled from
python -m perf.parts.rules            the rules, each alone and all together
python -m perf.parts.cache_policy     hit rates of the embedding tiers' cache against LRU
"""
