"""Print a plan as tables for people."""

from __future__ import annotations

from rich.console import Console, Group, JustifyMethod
from rich.table import Table

from hps_config import memory
from hps_config.hit_rate import WARM_UP_SHARE, HitRates
from hps_config.planning import Plan
from serving.tables.levels.rocks_options import (
    BLOCK_BYTES,
    BLOCK_CACHE_BYTES,
    BLOOM_BITS_PER_KEY,
    DISK_ROW_BYTES,
    INDEX_BYTES_PER_BLOCK,
    MEMTABLE_BYTES,
)


def format_bytes(count: int) -> str:
    """Return a number of bytes as text, such as `1.5 KiB` for 1536."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def print_plan(plan: Plan, hit_rates: dict[str, HitRates], console: Console) -> None:
    """Print bytes per level and process, predicted hit rates of the traced tables, and the assumptions behind them."""
    parts = [_tabulate_levels(plan), _tabulate_totals(plan)]
    if hit_rates:
        parts.append(_tabulate_hit_rates(hit_rates))
    console.print(Group(*parts))
    for assumption in list_assumptions(plan, bool(hit_rates)):
        console.print(f"- {assumption}", markup=False, highlight=False)


def list_assumptions(plan: Plan, traced: bool) -> list[str]:
    """Return the assumptions behind the figures of a plan, one sentence each. traced: whether hit rates were predicted"""
    sentences = [
        "L1: HPS has one for every table. Our own levels have none where L2 holds the whole table, because its shared rows are "
        "read as fast.",
        f"L1: whole sets of {memory.L1_SET_ROWS} rows, decoded to fp32, with their index and use counts.",
        "L2: one copy for all processes in shared memory, rows in the table's row format "
        "(a Redis cluster keeps fp32 rows and its own overhead instead).",
        f"L3: fp32 rows with {DISK_ROW_BYTES} bytes of overhead each, uncompressed; compaction may briefly need as much again.",
        f"RocksDB's memory: {BLOOM_BITS_PER_KEY} bits of filter a row, {INDEX_BYTES_PER_BLOCK} bytes of index a block of "
        f"{BLOCK_BYTES}, and a cache of {format_bytes(BLOCK_CACHE_BYTES)}. It counts against L1's budget unless L2 holds every "
        f"row. Live updates add up to {format_bytes(2 * MEMTABLE_BYTES)} a table, and the updater is one more such process.",
        "Not counted in RocksDB's memory: the C library's heaps of the threads that read it, 8 to 43 MiB a process (measured, "
        "16 threads), and almost nothing with MALLOC_ARENA_MAX=1.",
        f"Per process: L1, RocksDB's memory and the buffers of a request of {plan.budgets.max_batch_size} samples, without the "
        "interpreter.",
        "NVIDIA's hps backend keeps fp32 rows: in GPU memory, one full cache per GPU; in L2, each in a multiple of 64 bytes, "
        "with 37 to 65 bytes of index, which the budget does not count.",
    ]
    if traced:
        sentences.append(
            "Hit rates: simulated with exact LRU per level (on steady Zipf traffic our L1 is 1 point below to 7 above that). "
            f"The {plan.budgets.instances} processes take the lookups in turn, and the first {WARM_UP_SHARE:.0%} of the trace "
            "only warms the levels."
        )
    return sentences


def _tabulate_levels(plan: Plan) -> Table:
    table = Table(title="rows and bytes per table")
    columns: tuple[tuple[str, JustifyMethod], ...] = (
        ("table", "left"),
        ("width", "right"),
        ("format", "left"),
        ("rows", "right"),
    )
    for name, justify in columns:
        table.add_column(name, justify=justify)
    for level in ("L1 of one process", "L2 of the machine", "L3 on disk"):
        table.add_column(level, justify="right")
    for planned in plan.tables:
        spec = planned.table
        levels = ((planned.l1_rows, planned.l1_bytes), (planned.l2_rows, planned.l2_bytes), (planned.l3_rows, planned.l3_bytes))
        cells = (f"{rows:,} rows\n{format_bytes(size)}" if rows else "none" for rows, size in levels)
        table.add_row(spec.name, str(spec.width), spec.row_format, f"{spec.rows:,}", *cells)
    return table


def _tabulate_totals(plan: Plan) -> Table:
    budgets, table = plan.budgets, Table(title="bytes against budgets")
    for name in ("what", "planned", "budget"):
        table.add_column(name, justify="left" if name == "what" else "right")
    table.add_row("L1 of one process", format_bytes(plan.l1_bytes), format_bytes(budgets.l1_bytes))
    table.add_row("RocksDB's memory of one process", format_bytes(plan.l3_memory_bytes), "")
    table.add_row("request buffers of one process", format_bytes(plan.buffer_bytes), "")
    table.add_row("private memory of one process", format_bytes(plan.process_bytes), "")
    if plan.spared_bytes:
        table.add_row("the same in our own levels", format_bytes(plan.process_bytes - plan.spared_bytes), "")
    table.add_row("L2 of the machine", format_bytes(plan.l2_bytes), format_bytes(budgets.l2_bytes))
    table.add_row("update rings of the machine", format_bytes(plan.ring_bytes), "")
    table.add_row(f"memory of the machine, {budgets.instances} processes", format_bytes(plan.machine_bytes), "")
    if plan.spared_bytes:
        own_bytes = plan.machine_bytes - budgets.instances * plan.spared_bytes
        table.add_row("the same in our own levels", format_bytes(own_bytes), "")
    table.add_row("L3 on disk", format_bytes(plan.l3_bytes), format_bytes(budgets.l3_bytes))
    return table


def _tabulate_hit_rates(hit_rates: dict[str, HitRates]) -> Table:
    table = Table(title="predicted hit rates, shares of all lookups")
    for name in ("table", "lookups", "L1", "L2", "in memory", "L3"):
        table.add_column(name, justify="left" if name == "table" else "right")
    for name, rates in hit_rates.items():
        shares = (rates.l1, rates.l2, rates.memory, 1 - rates.memory)
        table.add_row(name, f"{rates.lookups:,}", *(f"{share:.2%}" for share in shares))
    return table
