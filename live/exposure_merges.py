"""Merge the small files of the exposure log: gateways write one every ten seconds, and reading takes some 2 ms a file.

    parts of a past hour ─▶ record which file replaces them ─▶ write that file: from here on, readers leave the parts out
                                                            ─▶ a round after PARTS_S removes the parts

Whenever a crash comes, readers see either the parts or the file that replaces them, never both. The parts stay for PARTS_S,
because a reader may just have listed them: servers that share a live store do their rounds whenever each of them was started.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import pyarrow as pa

from live.archive import write_table
from live.exposures import FOLDER, MERGES_FILE, list_all_files, list_exposure_files, parse_written_ms, read_file
from serving.contract.durable import make_durable, replace_durably

HOUR_MS = 3_600_000
PARTS_S = 300.0  # longer than a reader takes, and shorter than the pause between two rounds of one server
MERGED_BYTES = 8 << 20  # of the parts of one merged file; they take some 50 MB of memory


def merge_exposures(live: Path, now_ms: int) -> int:
    """Remove the parts that were merged before, then merge the files of past hours. Return how many files were merged.

    Does nothing within PARTS_S of the last merge.
    live: folder of the live store; now_ms: unix milliseconds. The caller holds the lock of maintenance.
    Raises ArtifactError for a file that cannot be read.
    """
    folder = live / FOLDER
    if not folder.is_dir():
        return 0
    if is_just_merged(folder):
        return 0
    remove_merged(folder)
    merges = choose_merges(folder, now_ms)
    if merges:
        record_merges(folder, merges)
    for name, parts in merges.items():
        tables = [table for part in parts if (table := read_file(folder / part)) is not None]
        if tables:  # retention may have removed all parts meanwhile
            write_table(folder / name, pa.concat_tables(tables).combine_chunks())
    return sum(map(len, merges.values()))


def is_just_merged(folder: Path) -> bool:
    """Return whether the last merge was less than PARTS_S ago; False if the clock was set back since."""
    try:
        return 0 <= time.time() - (folder / MERGES_FILE).stat().st_mtime < PARTS_S
    except FileNotFoundError:
        return False


def remove_merged(folder: Path) -> None:
    """Remove files that another one replaces, then the record of what replaces them."""
    merged = {path.name for path in list_all_files(folder)} - {path.name for path in list_exposure_files(folder)}
    for name in merged:
        (folder / name).unlink(missing_ok=True)
    make_durable(folder)
    (folder / MERGES_FILE).unlink(missing_ok=True)


def choose_merges(folder: Path, now_ms: int) -> dict[str, list[str]]:
    """Choose the files to merge. Return the name of each new file -> the names of its parts, oldest first."""
    runs: list[list[Path]] = []
    hour, room = -1, 0
    for path in list_exposure_files(folder):
        written_hour = parse_written_ms(path) // HOUR_MS
        if written_hour >= now_ms // HOUR_MS:
            break
        try:
            size = path.stat().st_size
        except FileNotFoundError:  # a gateway's retention removed it
            continue
        if written_hour != hour or size > room:
            runs.append([])
            hour, room = written_hour, MERGED_BYTES
        runs[-1].append(path)
        room -= size
    merges: dict[str, list[str]] = {}
    taken_names = {path.name for run in runs for path in run}
    for run in runs:
        if len(run) > 1:
            name = choose_name(parse_written_ms(run[-1]), taken_names)
            merges[name] = [path.name for path in run]
            taken_names.add(name)
    return merges


def choose_name(written_ms: int, taken_names: set[str]) -> str:
    """Return a free name for a merged file whose latest part was written at `written_ms`, unix milliseconds.

    It has 0 as the number of the process, which no gateway has.
    """
    number = 0
    while (name := f"exposures-{written_ms:013d}-0-{number}.parquet") in taken_names:
        number += 1
    return name


def record_merges(folder: Path, merges: Mapping[str, Sequence[str]]) -> None:
    """Write the record that `read_merges` reads. merges: from `choose_merges`"""
    with replace_durably(folder / MERGES_FILE) as file:
        file.write(json.dumps(merges).encode())
