"""No request waits until a loop is compiled: loading a stage, and its warm-up by the server, compile all that it may need."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from numba import typeof

from repository.applied_rules import apply_rules
from repository.checks.recorded import RECORDED_FILE, read_recorded
from serving.contract.artifacts import find_stage_folder, read_stage
from serving.contract.tensors import ENSEMBLE, PAD_ID, STAGES, make_stage_specs
from serving.live.reader import PAIR
from serving.pipeline import Pipeline
from serving.stages.live.users.live_users import as_columns
from tests.long.live.stage_process import Loops, StageProcess
from tests.unit.live.answers import answer, event_inputs, last_event_ms, upserted

USER, STRANGER, NEW_USER, NEW_ITEM, WARMED = 7, -5, -6, 1_000, 4
RULES: tuple[dict[str, Any], ...] = (
    {"blocked_items": [3]},
    {"pinned": [{"item_id": 4, "slot": 1}], "price_cap": 30.0},
    {"exploration": {"slots": 2, "pool": 5}, "diversity": 0.5, "max_per_category": 2},
    {},
)


@pytest.fixture
def stages(repository) -> Iterator[dict[str, StageProcess]]:
    stages = {name: StageProcess(name, repository) for name in STAGES}
    yield stages
    for stage in stages.values():
        stage.close()


def test_what_a_request_needs_is_compiled_before_it(repository, stages, observe, upsert):
    info = read_stage(find_stage_folder(repository, STAGES[0], 1))
    pipeline = Pipeline(info, stages, make_stage_specs(info.axes, info.context))
    recorded = read_recorded(find_stage_folder(repository, ENSEMBLE, 1) / RECORDED_FILE).inputs
    for row in range(WARMED):
        pipeline({name: values[row : row + 1] for name, values in recorded.items()})
    compiled: dict[str, Loops] = {name: stage.list_loops() for name, stage in stages.items()}

    def ask(change: str, *users: int, **inputs: np.ndarray) -> None:
        """Send requests; `change` is what happened before them."""
        for user in users or (USER, STRANGER, NEW_USER):
            answer(pipeline, [user], **inputs)
        for name, stage in stages.items():
            late = stage.list_loops() - compiled[name]
            assert not late, f"{change}: {name} compiled {sorted(loop for loop, _ in late)}"

    def pad(*item_ids: int, width: int) -> np.ndarray:
        return np.array([[*item_ids, *[PAD_ID] * (width - len(item_ids))]])

    def buy(user: int, item: int, after_s: int) -> None:
        observe(event_inputs(user_id=[user], item_id=[item], timestamp_ms=[last_event_ms(repository) + 1_000 * after_s]))

    axes = info.axes
    ask("start")
    ask("a history", STRANGER, history=pad(1, 2, width=axes.history))
    ask("excluded items", exclude=pad(1, 2, width=axes.exclusions))
    ask("named items", among=pad(*range(1, 20), width=axes.candidates))
    answer(pipeline, [USER, STRANGER, NEW_USER])
    ask("a batch")
    buy(USER, 1, after_s=1)
    buy(NEW_USER, 2, after_s=2)
    ask("purchases")
    upserted(upsert, NEW_ITEM, title="game number 7", kind="game", category="game", price=3.0)
    upserted(upsert, 5, price=99.0)
    upserted(upsert, 6, available=False, category="book")
    ask("new and changed items")
    for number in range(30):
        buy(-100 - number, 1 + number % 9, after_s=3 + number)
    buy(USER, NEW_ITEM, after_s=100_000)
    ask("many purchases, and a day later")
    for number in range(1, 8):  # to the last row that is free
        upserted(upsert, NEW_ITEM + number, title=f"game number {number}", kind="game", category="game", price=3.0)
    ask("many new items")
    ask("named new items", among=pad(NEW_ITEM, NEW_ITEM + 1, 8, width=axes.candidates))
    for rules in RULES:
        apply_rules(repository, rules)
        ask(f"rules {rules}")


def test_seen_items_have_one_type_wherever_they_are_read():
    """The store's bytes are read-only, and what Redis holds is written into a new array."""
    pairs = np.zeros(3, PAIR)
    assert typeof(as_columns(pairs)) == typeof(as_columns(np.frombuffer(pairs.tobytes(), PAIR)))
