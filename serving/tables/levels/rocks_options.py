"""Options of RocksDB, the memory that they cost every process with the database open, and the size of a table on disk."""

from __future__ import annotations

from math import ceil

from rocksdict import BlockBasedOptions, Cache, MemtableFactory, Options

BLOCK_CACHE_BYTES = 8 << 20  # of one store, all tables, without index and filters; hot rows are in L1 and L2
BLOOM_BITS_PER_KEY = 10  # 1 % of unknown keys cost a read (false positives)
BLOCK_BYTES = 4096
INDEX_BYTES_PER_BLOCK = 15  # measured
FILE_BYTES = 2048  # measured, per file of a table: its properties, and rounding
BLOCK_ROW_BYTES = 16  # overhead of a row in a block: key, sequence number, lengths
DISK_ROW_BYTES = 8 + 12  # beside a row's values: key, sequence number, index and filter (measured: 10 to 12 without the key)
FULL_SHARE = 0.9  # fill of a block: rows are not split over blocks
MEMTABLE_BYTES = 4 << 20  # bounds what a secondary replays while it holds the interpreter: 0.6 us per row
MERGED_BYTES_PER_S = 160 << 20  # at most; the limiter starts from a twentieth, enough for 80,000 updated rows a second
REPORT_BYTES = 1 << 20  # limit of RocksDB's own LOG, of which it keeps two: otherwise it grows by 40 MB a day
REFILL_US = 10_000  # how often the rate limiter allows further writes
WRITE_BYTES = 128 << 10  # of one write to a file: small, so that a request seldom waits for it
SST_ROWS = 1_000_000  # rows per file, to bound the memory of loading


def estimate_disk_bytes(rows: int, width: int) -> int:
    """Return the bytes of a table on disk, compacted; compaction itself may need as much again for a while."""
    return rows * (4 * width + DISK_ROW_BYTES)


def estimate_reader_bytes(rows: int, width: int) -> int:
    """Return the bytes that every process with the database open needs for a table: filters, and the index of blocks."""
    rows_per_block = ceil(FULL_SHARE * BLOCK_BYTES / (BLOCK_ROW_BYTES + 4 * width))
    index_bytes = INDEX_BYTES_PER_BLOCK * ceil(rows / rows_per_block)
    return ceil(rows * BLOOM_BITS_PER_KEY / 8) + index_bytes + FILE_BYTES * ceil(rows / SST_ROWS)


def make_options(cache: Cache, direct_reads: bool, writable: bool) -> Options:
    """Return the options of a database and of each of its tables. cache: of blocks, shared by all tables"""
    options = Options(raw_mode=True)
    options.create_if_missing(True)
    options.create_missing_column_families(True)
    options.set_use_direct_reads(direct_reads)
    options.set_advise_random_on_open(True)
    options.set_keep_log_file_num(2)
    options.set_max_file_opening_threads(1)  # the default of 16 per table costs 4 ms per catch-up of 10 tables
    options.set_write_buffer_size(MEMTABLE_BYTES)
    if writable:  # a vector sorts its rows once, when it is full. That takes a quarter of the time, and the writer never reads
        options.set_memtable_factory(MemtableFactory.vector())
        options.set_allow_concurrent_memtable_write(False)
        # Not for a secondary, whose log folder is temporary: if it is removed, RocksDB crashes at the next file.
        options.set_max_log_file_size(REPORT_BYTES)
        # Flush and compact through a rate limiter: otherwise they take a core from the requests for up to 0.2 s.
        options.set_auto_tuned_ratelimiter(MERGED_BYTES_PER_S, REFILL_US, fairness=10)
        options.set_writable_file_max_buffer_size(WRITE_BYTES)
    blocks = BlockBasedOptions()
    blocks.set_block_size(BLOCK_BYTES)
    blocks.set_bloom_filter(BLOOM_BITS_PER_KEY, False)
    blocks.set_block_cache(cache)
    options.set_block_based_table_factory(blocks)
    return options
