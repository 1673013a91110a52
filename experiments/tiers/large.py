"""A real server over a table far larger than its RAM: p99 of `recommend` against a server with all rows in RAM.

The repository three times, its `rank` stage over the large table (large_catalogue.py): the candidates of every request have
keys drawn by Zipf's law. Everything else is the repository's own. The servers take turns, with one client that waits for each
answer, and with the same requests at the same instants: Poisson at half of the peak of the one that waits for misses. A request
has the next keys of one sequence, on every server, so not the same ones in the same turn.
"""

from __future__ import annotations

import os
import shutil
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from experiments.tiers.big import WAITS, cases_of
from experiments.tiers.device import read_through
from experiments.tiers.kernel import link_tables, tiers_of, with_large
from experiments.tiers.large_catalogue import TABLE
from experiments.tiers.ram import ram_share
from experiments.tiers.served import LOAD_SHARE, PEAK_CLIENTS, WINDOW_S, drawn, load, p99_ms_of
from experiments.tiers.traffic import settings, write_table, zipf_keys
from export.relayout import relayout
from perf.bench import Bench, new_bench
from perf.load.open_loop import Outcome
from perf.observe.hit_rates import REPORTED_AFTER_S, read_samples
from perf.progress import progress
from perf.target import own_server, site_of
from perf.turns import Turns, taking_turns
from perf.variant import seal_again
from serving.contract.artifacts import read_stage, stage_folder
from serving.contract.errors import ServerError
from serving.contract.generations import pinned_generation
from serving.contract.tensors import ENSEMBLE
from serving.tables.store.tiers import CONFIG_FILE

HERE = Path(__file__).parent
KEYS = 80_000  # requests with keys of their own
WARM_CLIENTS, WARM_S = 8, 5.0
LOADS = {"one client": "one", "half of peak": "half"}  # -> its part of a figure's name
ROWS_ASKED, BYTES_HELD = "recommender_table_rows_total", "recommender_table_resident_bytes"


@dataclass
class Side:
    """One server. p99_ms: load -> by round"""

    case: str
    bench: Bench
    turns: Turns
    p99_ms: dict[str, list[float]] = field(default_factory=lambda: {load: [] for load in LOADS})

    def answered(self) -> Counter[str]:
        """Rows of the large table so far, by what answered."""
        found: Counter[str] = Counter()
        for answer, rows in self._told(ROWS_ASKED, "answer"):
            found[answer] += int(rows)
        return found

    def ram_share(self, rows: int) -> float:
        """Of the large table's bytes: L1 and RocksDB of every instance, and L2, which they share."""
        nbytes: dict[str, list[int]] = {"l1": [], "l2": []}
        for level, of_instance in self._told(BYTES_HELD, "level"):
            nbytes[level].append(int(of_instance))
        return ram_share(rows, sum(nbytes["l1"]), max(nbytes["l2"]), processes=len(nbytes["l2"]))

    def _told(self, name: str, label: str) -> list[tuple[str, float]]:
        """Of the server's metrics of that name: this label and the value of each that is of the large table."""
        with self.turns.turn():
            time.sleep(REPORTED_AFTER_S)
            samples = read_samples(self.bench.site.metrics_url)
        of_name = ((labels.split(","), value) for (told, labels), value in samples.items() if told == name)
        labelled = [(dict(each.split("=", 1) for each in labels), value) for labels, value in of_name]
        found = [(labels[label], value) for labels, value in labelled if labels["table"] == TABLE]
        if not found:
            raise ServerError(f"{self.case}: the server's metrics lack {name} of {TABLE}. Expected a rank stage over it.")
        return found


def bench_large(
    repo: Path,
    folder: Path,
    scratch: Path,
    rows: int,
    rng: np.random.Generator,
    exponent: float,
    seconds: float,
    rounds: int,
) -> list[dict]:
    source = write_table(folder, rows, rng)
    keys = zipf_keys(rows, exponent, (KEYS, candidates_of(repo)), rng).astype(np.int32)
    with ExitStack() as running:
        with progress(2 * len(cases_of(rows)) + rounds) as step:
            sides = []
            for number, case in enumerate(cases_of(rows)):
                step(f"a server, {case}")
                sides.append(served(repo, source, scratch / str(number), rows, case, keys, running))
            read_through(source)
            waits = next(side for side in sides if side.case == WAITS)
            peaks = {}
            for side in sides:  # of all: they are equally warm then
                step(f"its peak, {side.case}")
                peaks[side.case] = peak_of(side)
            rate = LOAD_SHARE * peaks[WAITS]
            before = [side.answered() for side in sides]
            for number in range(rounds):
                step(f"round {number + 1}")
                requests = drawn(waits.bench, rate, seconds)
                for side in sides if number % 2 == 0 else sides[::-1]:
                    with side.turns.turn():
                        one = side.bench.closed(ENSEMBLE, "grpc", "concurrency", 1, WINDOW_S)
                        side.p99_ms["one client"].append(one.latency.p99_ms)
                        side.p99_ms["half of peak"].append(sound_p99_ms(load(side.bench, requests)))
        return [described(side, then, sides[0], rate, rows) for side, then in zip(sides, before, strict=True)]


def candidates_of(repo: Path) -> int:
    return read_stage(stage_folder(repo, "rank", pinned_generation(repo))).axes.candidates


def served(repo: Path, source: str, scratch: Path, rows: int, case: str, keys: np.ndarray, running: ExitStack) -> Side:
    """A server whose caches are warm, stopped until its turn."""
    large_repository(repo, scratch, source, rows, case, keys)
    server = running.enter_context(own_server(scratch / "repository"))
    bench = new_bench(site_of(server.state), case, scratch / "raw")
    bench.closed(ENSEMBLE, "grpc", "concurrency", WARM_CLIENTS, WARM_S)
    return Side(case, bench, running.enter_context(taking_turns(server.state.tag)))


def large_repository(repo: Path, scratch: Path, source: str, rows: int, case: str, keys: np.ndarray) -> None:
    """`scratch`/repository: `repo` with the code as it is now, its rank stage over the large table."""
    generation = relayout(repo, scratch / "repository", "ensemble")
    folder = stage_folder(scratch / "repository", "rank", generation)
    own, links = tiers_of(scratch / "repository", generation), scratch / "tables"
    links.mkdir()
    link_tables(own, source, links)
    threshold, levels = cases_of(rows)[case]
    config = with_large(own, settings(rows, source, threshold, **levels), links, f"bench-large-{os.getpid()}-{scratch.name}")
    (folder / "large").mkdir()
    config.write(folder / "large" / CONFIG_FILE)
    np.save(folder / "large" / "keys.npy", keys)
    shutil.copyfile(HERE / "large_catalogue.py", folder / "large_catalogue.py")
    shutil.copyfile(HERE / "large_model.py", folder / "model.py")
    seal_again(scratch / "repository", generation, "rank")


def peak_of(side: Side) -> float:
    with side.turns.turn():
        levels = [side.bench.closed(ENSEMBLE, "grpc", "concurrency", n, WINDOW_S) for n in PEAK_CLIENTS]
    return max(level.achieved_rate for level in levels)


def sound_p99_ms(outcome: Outcome) -> float:
    if outcome.errors:
        raise ServerError(
            f"Requests failed: {dict(outcome.errors)}. Expected none: a p99 of those that were answered says nothing."
        )
    return p99_ms_of(outcome)


def described(side: Side, before: Counter[str], all_in_ram: Side, rate: float, rows: int) -> dict:
    after = side.answered()
    if after.total() > KEYS * candidates_of(side.bench.site.repo):
        raise ServerError(f"{side.case}: {after.total():,.0f} rows were asked for, more than were drawn. Raise KEYS.")
    asked = {answer: count - before[answer] for answer, count in after.items()}
    in_memory = (asked["l1"] + asked["l2"]) / sum(asked.values())
    late = asked["default_late"] / sum(asked.values())
    result = {"case": side.case, "rate": round(rate)}
    result |= {"ram_share": side.ram_share(rows), "memory_hit_rate": round(in_memory, 4), "late": round(late, 4)}
    for name, key in LOADS.items():
        ratios = np.divide(side.p99_ms[name], all_in_ram.p99_ms[name])
        result |= {f"{key}_p99_ms": np.round(side.p99_ms[name], 1).tolist(), f"{key}_p99_ratio": np.round(ratios, 2).tolist()}
    print(
        "{case:30} RAM {ram_share:6.1%}  in memory {memory_hit_rate:.1%}  late {late:.1%}  p99 of one client {one_p99_ms} ms "
        "({one_p99_ratio} of all in RAM), "
        "at {rate}/s {half_p99_ms} ms ({half_p99_ratio})".format(**result)
    )
    return result
