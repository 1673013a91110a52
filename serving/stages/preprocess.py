"""First stage: from a user id to the features that the models read.

    user_id ─▶ store ─▶ UserState ─(live events)─(history override)─▶ raw columns ─▶ Plan ─▶ user_categorical, …, history

Unknown users, also with negative or huge ids, are cold-start users. When the store cannot answer, every user is treated as one,
and `degraded` is set. A live store overrides the generation's users and clock.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from serving.contract.artifacts import REMEDY, StageInfo, open_checked_array, read_stage
from serving.contract.errors import ArtifactError, DependencyError
from serving.contract.measurements import Measurement
from serving.contract.tensors import ContextColumn, Degraded, new_lineage
from serving.contract.texts import tidy_bytes
from serving.live.reader import Reader
from serving.stages.features.drift import DriftWindow
from serving.stages.features.encode import Plan
from serving.stages.features.ids import ItemIndex
from serving.stages.features.new_ids import NewIds
from serving.stages.features.probes import find_asked
from serving.stages.features.user_state import UserState, compute_history_age_days, derive_raw_columns, override_history
from serving.stages.features.user_store import FeatureStore, UserStore, name_features
from serving.stages.live.catalogue.categories import ItemCategories
from serving.stages.live.catalogue.items import LiveItems
from serving.stages.live.content import Content
from serving.stages.live.measurements import VISIBLE, measure_times
from serving.stages.live.users.live_users import LiveUsers
from serving.stages.live.users.user_trends import UserTrends

MAX_STRING_BYTES = 1024

Arrays = dict[str, np.ndarray]


@dataclass
class PreprocessInputs:
    """Reads the users of a batch, before encoding, in every layout of the stage.

    store: answers lookups; embedded: the store in the version folder, which gives an unknown user's state
    """

    context: tuple[ContextColumn, ...]
    store: FeatureStore
    embedded: UserStore
    items: ItemIndex
    item_category: np.ndarray  # int32 [n_items + 1]
    content: Content
    live: LiveUsers | None = None
    live_items: LiveItems | None = None
    trends: UserTrends | None = None  # declared aggregations of users
    interests: tuple[str, ...] = ()  # names of events, see LiveUsers
    repeats: bool = False  # see LiveUsers

    @classmethod
    def load(cls, folder: Path, info: StageInfo) -> PreprocessInputs:
        """Load from a version folder. Raises ArtifactError when a file is missing or is not as published."""
        store, items = UserStore(folder / "store"), ItemIndex.load(folder / "item_ids.npy")
        categories = open_checked_array(folder, "item_category", "int32", items.n_items + 1)
        user_settings = {"interests": tuple(info.settings["interests"]), "repeats": info.settings["repeats"]}
        return cls(info.context, store, store, items, categories, Content.load(folder), **user_settings)

    def with_live(self, reader: Reader) -> PreprocessInputs:
        """Return a copy that adds what users did since the export."""
        users = LiveUsers(reader.users, self.items, self.item_category, self.interests, self.repeats)
        live = users.with_machine_code(self.embedded.make_empty(np.zeros(2, np.int64)))
        trends = UserTrends.of(self.embedded, self.items, reader)
        arrays = ItemCategories(self.content, self.item_category)
        return replace(self, live=live, live_items=LiveItems(reader, self.items, self.content, arrays), trends=trends)

    def find_faults(self, inputs: Arrays) -> dict[int, str]:
        """Return a message by row for context that cannot be a feature: infinite numbers, strings past MAX_STRING_BYTES."""
        faults: dict[int, str] = {}
        for column in self.context:
            values = inputs[column.name]
            if column.kind == "continuous" and np.isinf(values).any():
                message = f"{column.name} is infinite; expected a finite number, or NaN for a missing one"
                faults |= dict.fromkeys(np.flatnonzero(np.isinf(values).any(axis=1)).tolist(), message)
            elif column.kind == "string":
                for row, value in enumerate(values[:, 0]):
                    if len(value) > MAX_STRING_BYTES:
                        faults[row] = f"{column.name} has {len(value)} bytes; expected at most {MAX_STRING_BYTES}, shorten it"
        return faults

    def read_state(self, inputs: Arrays) -> tuple[UserState, int | np.ndarray, int | np.ndarray]:
        """Return the state of the users, the clock in unix seconds, and the degraded bits.

        Clock and bits are one number for all rows, or int64 [B].
        """
        user_ids, clock_s = inputs["user_id"][:, 0], self.embedded.as_of_s
        degraded: int | np.ndarray = Degraded.NONE
        try:
            state = self.store.lookup(user_ids)
        except DependencyError:
            state, degraded = self.embedded.make_empty(user_ids), Degraded.PREPROCESS
        if self.live_items:
            self.live_items.refresh()  # its result is not needed: `live.update` reports a store that cannot be read
        if self.live:
            clock_s, behind = self.live.update(state, inputs["after"][:, 0], clock_s)
            degraded = degraded | behind
        if self.trends:
            if not self.trends.refresh():
                degraded = degraded | Degraded.LIVE
            features = self.trends.read(user_ids, clock_s)
            state = replace(state, aggregates=name_features(self.trends.stored.plan, features))
        state = override_history(state, inputs["history"], self.items, self.item_category, clock_s)
        if self.live:  # an event, also a view, may be newer than the watermark: no feature may have a negative age
            latest_s = np.maximum(state.last_time, state.history_times[:, 0])
            return state, np.maximum(latest_s, clock_s), degraded
        return state, clock_s, degraded

    def derive_columns(self, state: UserState, inputs: Arrays, clock_s: int | np.ndarray) -> dict[str, np.ndarray]:
        """Return the workflow's input columns by name, each [B]."""
        context = {column.name: inputs[column.name][:, 0] for column in self.context}
        for column in self.context:
            if column.kind == "string":
                context[column.name] = np.array([tidy_bytes(text) for text in context[column.name]], object)
        return derive_raw_columns(state, context, clock_s)


def make_history_tensors(state: UserState, clock_s: int | np.ndarray) -> Arrays:
    """Return history_ids int64 [B, H], history_age_days float32 [B, H] and history_interests int64 [B, 1]."""
    ages = compute_history_age_days(state, clock_s)
    return {
        "history_ids": state.history_ids,
        "history_age_days": ages,
        "history_interests": state.history_interests.reshape(-1, 1),
    }


@dataclass
class Preprocess:
    """The stage in one process: inputs, then the compiled plan."""

    info: StageInfo
    inputs: PreprocessInputs
    plan: Plan
    drift: DriftWindow | None = None
    new_ids: NewIds = field(default_factory=NewIds)

    @classmethod
    def load(cls, folder: Path) -> Preprocess:
        """Load the stage from its version folder.

        Raises ArtifactError when a file is missing or disagrees with `stage.json`.
        """
        info = read_stage(folder)
        plan, inputs = Plan.load(folder / "plan"), PreprocessInputs.load(folder, info)
        axes = (info.axes.user_categorical, info.axes.user_continuous, info.axes.history)
        own_axes = (len(plan.categorical), len(plan.continuous), inputs.embedded.history_length)
        if axes != own_axes:
            raise ArtifactError(f"{folder}: stage.json states Fu, Gu, H = {axes}, plan and store have {own_axes}. {REMEDY}")
        return cls(info, inputs, plan, DriftWindow.load(folder, len(plan.categorical)))

    def with_live(self, reader: Reader) -> Preprocess:
        """Return the stage with a live store attached."""
        return replace(self, inputs=self.inputs.with_live(reader))

    def find_faults(self, inputs: Arrays) -> dict[int, str]:
        """Return a message by row for context that cannot be a feature."""
        return self.inputs.find_faults(inputs)

    def __call__(self, inputs: Arrays) -> Arrays:
        """Serve one batch of `preprocess` (serving/contract/tensors.py)."""
        state, clock_s, degraded = self.inputs.read_state(inputs)
        asked_rows = find_asked(state.user_ids)
        self.new_ids.count(state, inputs["history"], self.inputs.items, asked_rows)
        encoded = self.plan(self.inputs.derive_columns(state, inputs, clock_s))
        if self.drift:
            self.drift.add(state.user_ids[asked_rows], encoded.categorical[asked_rows], encoded.continuous[asked_rows])
        return {
            "user_categorical": encoded.categorical,
            "user_continuous": encoded.continuous,
            **make_history_tensors(state, clock_s),
            "lineage": new_lineage(len(state.user_ids), self.info.generation, degraded),
        }

    def list_measurements(self) -> Iterator[Measurement]:
        """Yield unknown users and items, the drift of features since the export, and the delay until events show in answers."""
        yield from self.new_ids.list_measurements()
        if self.drift:
            yield from self.drift.list_measurements()
        if self.inputs.live:
            yield from measure_times(VISIBLE, self.inputs.live.visible)
