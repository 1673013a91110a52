"""Embedding rows for the kernels: plain arrays, or a parameter server with levels that is updated while it serves.

tables.py       the plain arrays, memory-mapped
opening.py      open_tables: what a kernel calls, and then Tiers.gather
config.py       which rows each level holds, and where the levels live (tiers.json)

tiers.py        Tiers.lookup: L1 or L2, the hit-rate threshold, metrics
  table.py        one table in memory: L1 of the process, L2 and update ring of the machine
    slots.py        rows in slots, readable without a lock while others write or die
    hits.py         the compiled pass of a look-up: places of keys, rows, their values (lanes.py: eight at once)
    side_by_side.py one read for several tables that are wholly in L2
    memory.py       private memory, and files in shared memory with the locks of their users
    ring.py         the latest updates, by which every L1 learns of them
    row_formats.py  fp32, fp16, int8, int4
  lower.py        what lies below: L2, then one wave of L3, then the default vector
    level.py, breaker.py        a store that fails is left alone for a while
    rocks_store.py, redis_store.py, source.py   RocksDB and Redis in HPS's layouts; the exported tables
    loading.py      the first filling of RocksDB, and a new one in place of one that is damaged
  background.py   insertions that no request waits for
  metrics.py, measurements.py   what is counted, and under which names it is published

updater.py      Kafka messages: `python -m serving.tables tiers.json`, one process per machine
applier.py      their rows into all levels, of which each knows how far it has read the log (batch.py)
publisher.py    the sending side
formats/        bytes of keys, rows, messages and folders, as HPS writes them
"""
