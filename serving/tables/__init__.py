"""Embedding rows for the stages: plain arrays, or a parameter server with levels, which is updated while it serves.

opening.py      open_tables, which a stage calls before LeveledTables.gather
leveled.py      LeveledTables: look-ups over the levels, with the hit-rate threshold
filling.py      rows on their way up to L2 and L1, at the start and in the background
config.py       sizes and paths of the levels (levels.json)
metrics.py, measurements.py   counters, and the names of their metrics

store/          rows in memory
  tables.py       the plain arrays, memory-mapped
  table.py        one table: L1 of the process, L2 and update ring of the machine
  slots.py        rows in slots, readable without a lock even while a writer writes or dies
  complete_table.py, cached_table.py   slots of all rows, or of those in use
  hits.py         the compiled pass of a look-up (lanes.py: eight values at once)
  side_by_side.py one read for several tables that L2 holds completely
  memory.py       private memory, and locked files in shared memory
  ring.py         the latest updates, which every L1 applies
  batch.py        updated rows with their offsets in the log
  log_position.py how far each level has read the log of updates
  row_formats.py  fp32, fp16, int8, int4
levels/         the levels below L1
  lower.py        L2, then one wave of L3 reads, then the default vector
  level.py, breaker.py        a store behind a circuit breaker
  rocks_store.py, redis_store.py, source.py   RocksDB and Redis in HPS's layouts; the exported tables
  rocks_options.py, rocks_failures.py   RocksDB's settings and their memory; its errors, and which of them mean damage
  following.py    a RocksDB secondary that never returns to older rows
  loading.py      the first fill of RocksDB, and its replacement when it is damaged
  background.py   insertions (write-behind)
updates/        updates of rows while they are served
  updater.py      reads them from Kafka: `python -m serving.tables levels.json`, one process per machine
  applier.py      writes rows to all levels, each with its own position in the log
  backlog.py      rows for a store that is down
  publisher.py    sends them to Kafka
formats/        bytes of keys, rows, messages and folders, as HPS writes them

Imports only go to the right: updates -> levels -> store -> formats.
"""
