"""When an updated row shows in an answer: new rows of the candidates of one `rank` request, until their scores change.

publish a row ─▶ acknowledged ─▶ ask `rank` again and again ─▶ the candidate's score is another: visible
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from experiments.tiers.feed import beside, spawn
from perf.load.workload import Arrays, ask, draw, stage_inputs
from server.health import local_client
from serving.contract.tensors import ModelSpec, unpacked
from serving.stages.features.ids import ItemIndex
from serving.tables.updates.publisher import Publisher

WATCHED = 32  # candidates
EVERY_S = 0.1
NEVER_S = 5.0


@dataclass
class Watched:
    """What the watching process needs to know. keys: int64 [WATCHED] rows of `table`, each of one candidate alone."""

    url: str
    brokers: str
    model: str
    table: str
    spec: ModelSpec
    generation: int
    inputs: Arrays
    columns: np.ndarray  # int [WATCHED]: the candidates in the answer
    keys: np.ndarray
    rows: np.ndarray  # float32 [WATCHED, D] as exported
    go: Any = field(default_factory=spawn.Event)
    stop: Any = field(default_factory=spawn.Event)
    idle: Any = field(default_factory=spawn.Event)
    visible_ms: Any = field(default_factory=spawn.Queue)


def watched(bench, tables: Path, table: str, brokers: str, model: str) -> Watched:
    """bench: of the server to ask; tables: its rank model's tables."""
    request = draw(bench.requests, 1, bench.rng)
    inputs = stage_inputs(bench.site.grpc_url, bench.specs, bench.site.generation, request)["rank"]
    candidate_ids = unpacked(bench.specs["rank"].inputs, inputs)["candidate_ids"]
    positions = ItemIndex.load(tables.parent / "item_ids.npy").positions(candidate_ids)[0]
    keys = np.load(tables.parent / "item_rows.npy")[positions, 0].astype(np.int64)
    alone, columns, counts = np.unique(keys, return_index=True, return_counts=True)
    chosen = np.flatnonzero(counts == 1)[-WATCHED:]
    return Watched(
        bench.site.grpc_url,
        brokers,
        model,
        table,
        bench.specs["rank"],
        bench.site.generation,
        inputs,
        columns[chosen],
        alone[chosen],
        np.load(tables / f"{table}.npy", mmap_mode="r")[alone[chosen]],
    )


@contextmanager
def watcher(watched: Watched) -> Iterator[None]:
    """The process that watches, while its `go` is set."""

    def stop() -> None:
        watched.stop.set()
        watched.go.set()

    with beside("Who watches for new rows", run_watch, (watched,), stop):
        yield


def run_watch(watched: Watched) -> None:
    sender = Publisher(watched.brokers, watched.model, {watched.table: watched.rows.shape[1]})
    rng = np.random.default_rng(2)
    with local_client(watched.url) as client:
        at = 0
        while not watched.stop.is_set():
            watched.idle.set()
            watched.go.wait()
            watched.idle.clear()
            watched.visible_ms.put(1e3 * until_visible(watched, at, client, sender, rng))
            at = (at + 1) % len(watched.keys)
            time.sleep(EVERY_S)


def until_visible(watched: Watched, at: int, client: Any, sender: Publisher, rng: np.random.Generator) -> float:
    """Seconds from the acknowledgement of a new row to the first answer that uses it; infinite when it never came."""

    def score() -> float:
        answer = ask(client, watched.spec, str(watched.generation), watched.inputs)
        return float(unpacked(watched.spec.outputs, answer)["rank_scores"][0, watched.columns[at]])

    before = score()
    row = watched.rows[at] + rng.standard_normal(watched.rows.shape[1], dtype=np.float32)
    sender.publish(watched.table, watched.keys[at : at + 1], row[None])
    sender.flush()
    acknowledged_s = time.monotonic()
    while time.monotonic() < acknowledged_s + NEVER_S:
        now = score()
        if now != before:
            return time.monotonic() - acknowledged_s
    return float("inf")
