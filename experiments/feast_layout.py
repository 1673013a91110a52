"""Check our layout of users and items in Redis against the real Feast: it reads what we write, and we read what it writes.

    python -m experiments.feast_layout          # or: make check-feast

Makes an environment of its own in .run/environments (Feast's pins conflict with ours), and a Redis cluster of one node on
loopback. With --vectors it writes Feast's own bytes to the file that the unit test compares with.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from experiments.fault_backends import RedisNode
from experiments.harness import RESULTS, Figure, ResultsFolder, finish, read_machine
from experiments.other_environment import make_environment
from perf.command import run
from repository.triton.code import PROJECT
from serving.live.layout import Layout
from serving.live.shared.feast_views import ITEMS_VIEW, USERS_VIEW, View, list_item_features, list_user_features
from serving.live.shared.redis_state import Entity, RedisState

FEAST = "feast[redis]==0.67.*"
VECTORS = PROJECT / "tests" / "unit" / "live" / "redis" / "feast_vectors.json"
NAMES = ["view", "purchase"]  # of events
PROJECT_NAME = "shop"
N_ENTITIES = 50
SAMPLES: dict[str, Any] = {
    "int64": -5,
    "double": 0.1,
    "bytes": "",
    "int64_list": [1, -1, 1 << 62],
    "double_list": [0.5, -2.0],
    "float_list": [0.25, float("nan")],
    "string_list": ["view", "été"],
}


def draw_features(layout: Layout, rng: np.random.Generator) -> tuple[list[dict], list[dict]]:
    """Return features of random users and of random items."""
    users, items = layout.make_empty_users(N_ENTITIES), layout.make_empty_items(N_ENTITIES)
    for number, record in enumerate(users):
        n_history, n_session = number % (layout.history + 1), number % (layout.session + 1)
        record["history_ids"][:n_history] = rng.integers(0, 1 << 53, n_history)
        record["history_s"][:n_history] = rng.integers(0, 1 << 32, n_history)
        record["session_ids"][:n_session] = rng.integers(0, 1 << 53, n_session)
        record["session_ms"][:n_session] = rng.integers(0, 1 << 42, n_session)
        record["session_values"][:n_session] = rng.normal(size=n_session)
        record["session_kinds"][:n_session] = rng.integers(0, len(NAMES), n_session)
        record["event_count"], record["sum_weight"] = number, rng.normal()
    items["event_count"], items["decayed"] = np.arange(N_ENTITIES), rng.random((N_ENTITIES, 3))
    seen = [rng.integers(0, 1 << 53, number).tolist() for number in range(N_ENTITIES)]
    user_rows = [list_user_features(record, seen_items, NAMES) for record, seen_items in zip(users, seen, strict=True)]
    return user_rows, [list_item_features(record) for record in items]


def write(state: RedisState, view: View, ids: np.ndarray, rows: list[dict]) -> None:
    nothing = [Entity({}, b"", b"", [])] * len(ids)
    assert state.change(view, ids, nothing, [view.encode(row) for row in rows], [0] * len(rows)).all()


def find_differences(view: View, expected: list[dict], actual: list[dict]) -> list[str]:
    """Return where two lists of features differ."""
    return [
        f"{view.name} {row} {name}: {row_read.get(name)!r}, expected {expected_row[name]!r}"
        for row, (expected_row, row_read) in enumerate(zip(expected, actual, strict=True))
        for name in view.features
        if not is_equal(expected_row[name], row_read.get(name))
    ]


def is_equal(expected: Any, actual: Any) -> bool:
    if isinstance(expected, list) and not expected:
        return not actual  # Feast gives None for an empty list
    if isinstance(expected, list) and isinstance(expected[0], float):
        return np.array_equal(np.array(expected, np.float32), np.array(actual or [], np.float32), equal_nan=True)
    return expected == actual


def check(folder: Path, address: str, python: Path) -> tuple[list[str], dict]:
    """Let both sides write and read -> (what differs, Feast's own bytes)."""
    layout, rng = Layout(), np.random.default_rng(0)
    views = (USERS_VIEW, ITEMS_VIEW)
    own_ids, feast_ids = np.arange(N_ENTITIES) - 25, np.arange(N_ENTITIES) + 1_000
    our_rows, their_rows = (draw_features(layout, rng) for _ in range(2))
    to_write = {
        view.name: [
            {view.join_key: int(key)} | {name: row[name] for name in view.features}
            for key, row in zip(feast_ids, rows, strict=True)
        ]
        for view, rows in zip(views, their_rows, strict=True)
    }
    with closing(RedisState(address, PROJECT_NAME)) as state:
        for view, rows in zip(views, our_rows, strict=True):
            write(state, view, own_ids, rows)
        request = {
            "views": {view.name: {"join_key": view.join_key, "features": dict(view.features)} for view in views},
            "ids": {view.name: own_ids.tolist() for view in views},
            "to_write": to_write,
            "samples": {kind: sample for kind, sample in SAMPLES.items() if kind != "bytes"},
        }
        (folder / "asked.json").write_text(json.dumps(request))
        subprocess.run(
            [str(python), str(Path(__file__).with_name("feast_side.py")), address, PROJECT_NAME, str(folder)], check=True
        )
        answer = json.loads((folder / "answered.json").read_text())
        faults = []
        for view, own_rows, other in zip(views, our_rows, their_rows, strict=True):
            faults += [f"Feast reads {fault}" for fault in find_differences(view, own_rows, answer["read"][view.name])]
            read_rows = [entity.values for entity in state.read(view, feast_ids)]
            faults += [f"we read {fault}" for fault in find_differences(view, other, read_rows)]
    return faults, answer["vectors"]


def main(
    vectors: Annotated[bool, typer.Option("--vectors", help="write Feast's bytes for the unit test")] = False,
    results: ResultsFolder = RESULTS,
) -> None:
    """Check the layout against Feast. Exit code 1 when anything differs."""
    machine, python = read_machine(), make_environment("feast", (FEAST,))
    with tempfile.TemporaryDirectory() as name, RedisNode(Path(name)) as node:
        faults, feast_bytes = check(Path(name), node.address, python)
    for fault in faults[:20]:
        typer.echo(fault, err=True)
    if vectors:
        VECTORS.write_text(json.dumps(feast_bytes, indent=1) + "\n")
        typer.echo(f"wrote {VECTORS}", err=True)
    both_ways = ("written by us and read by Feast", "written by Feast and read by us")
    figures = [Figure(name=f"users and items {way}", values=[2 * N_ENTITIES]) for way in both_ways]
    figures.append(Figure(name="features of them that differ", values=[len(faults)], at_most=0))
    command = "python -m experiments.feast_layout"
    finish(
        "live-feast",
        "Live state in Feast's layout",
        command,
        f"{FEAST}, a Redis cluster of one node",
        figures,
        results,
        machine,
    )


if __name__ == "__main__":
    run(main, "python -m experiments.feast_layout")
