"""`observe` and `upsert`: the two models that write the live store.

Both append to the same log. Each is a model with one instance, and LMDB lets one of them write at a time. The dynamic batcher
collects what arrives while the last batch becomes durable: group commit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from serving.contract.artifacts import StageInfo, read_stage, stage_folder, stage_settings
from serving.contract.measurements import COUNTER, GAUGE, Kind, Measurement
from serving.contract.tensors import STAGES
from serving.live.admission import ChangeAdmission, EventAdmission
from serving.live.events import EventBatch, EventKind, EventKinds
from serving.live.layout import Layout
from serving.live.seeds import GenerationSeeds
from serving.live.store import DEFAULT_BYTES, Progress, live_folder, set_aside
from serving.live.writer import Writer, WriterSettings, wall_clock_ms
from serving.stages.features.user_state import UserStore

Arrays = dict[str, np.ndarray]
Model = TypeVar("Model", bound="LiveModel")
COUNTED = {  # by the store's helpers (live/)
    "evicted_users": "Idle users that were forgotten, ever",
    "kafka_messages": "Messages that were read, ever",
    "kafka_refused": "Messages that are no events, ever",
    "kafka_lost": "Messages that the brokers removed unread, ever",
}
STATED = {  # by the same, as they are now
    "kafka_lag": "Messages that are waiting in the topic",
    "kafka_broker_down": "1 while no broker answers",
    "redis_lag": "Events of this machine that Redis does not have yet",
    "redis_down": "1 while Redis does not answer the process that shares",
}
SILENT = "How long ago the consumer last stated its lag: it is down where this grows"


@dataclass(frozen=True)
class LiveSettings:
    """`settings` of stage.json, the same for both models.

    kinds: fields of EventKind, in the order of their codes
    columns: kind -> column -> its type, what `upsert` may change
    """

    kinds: tuple[Mapping[str, Any], ...]
    value_is: str
    columns: Mapping[str, Mapping[str, str]]
    lateness_s: float = 10.0
    ahead_s: float = 300.0
    key_days: float = 7.0
    store_bytes: int = DEFAULT_BYTES
    archive_days: float = 0.0
    archive_bytes: int = 0
    idle_days: float = 0.0
    most_users: int = 0
    brokers: str = ""
    topic: str = ""

    @property
    def event_kinds(self) -> EventKinds:
        return EventKinds(tuple(EventKind(**kind) for kind in self.kinds), self.value_is)


@dataclass
class LiveModel:
    """The common base of both models: a writer."""

    info: StageInfo
    writer: Writer
    settings: LiveSettings
    now_ms: Callable[[], int] = wall_clock_ms

    @classmethod
    def load(cls: type[Model], folder: Path) -> Model:
        """Load the model from its version folder. Raises ArtifactError, ConfigError or DependencyError."""
        info = read_stage(folder)
        settings = stage_settings(folder, info, LiveSettings)
        repository = folder.parents[1]
        users = UserStore(stage_folder(repository, STAGES[0], info.generation) / "store")
        place = live_folder(repository, info.live_folder)
        if info.shop:
            set_aside(place, info.shop)
        writer = Writer(
            place,
            Layout(history=users.history_length),
            settings.event_kinds.names,
            GenerationSeeds(users),
            settings=WriterSettings(settings.lateness_s, settings.key_days, settings.store_bytes),
            shop=info.shop,
        )
        return cls(info, writer, settings)

    def append(self, batch: EventBatch) -> Arrays:
        """Make events durable and return their `sequence`, int64 [N, 1]."""
        return {"sequence": self.writer.append(batch).reshape(-1, 1)}

    def close(self) -> None:
        self.writer.close()


class Observe(LiveModel):
    """`observe`: an interaction happened."""

    @property
    def admission(self) -> EventAdmission:
        return EventAdmission(self.settings.event_kinds, self.info.context, self.settings.ahead_s)

    def faults(self, inputs: Arrays) -> dict[int, str]:
        """Return a message for each malformed event, by row."""
        return self.admission.faults(inputs, self.now_ms())

    def __call__(self, inputs: Arrays) -> Arrays:
        """Serve one batch of `observe` (serving/contract/tensors.py)."""
        return self.append(self.admission.events(inputs, self.writer.codes, self.now_ms()))

    def measurements(self) -> Iterator[Measurement]:
        """Yield the store's size and positions."""
        progress: Progress = self.writer.store.read_progress()
        lag_s = max(self.now_ms() - progress.watermark_ms, 0) / 1000
        store = self.writer.store
        for name, description, value in (
            ("events_total", "Events of the log, ever", progress.last_sequence),
            ("late_events_total", "Events older than the watermark, ever", progress.late),
            ("repeated_events_total", "Events whose id had come before, ever", progress.repeated),
            ("watermark_lag_seconds", "How far the watermark is behind the wall clock", lag_s),
            ("store_bytes", "Size of the live store's file", store.size_bytes()),
            ("archive_bytes", "Size of the log's older part", store.archive_bytes()),
        ):
            kind: Kind = COUNTER if name.endswith("_total") else GAUGE
            yield Measurement(f"recommender_live_{name}", description, kind, {}, float(value))
        counters = store.read_counters()
        for name, description in COUNTED.items():
            yield Measurement(f"recommender_live_{name}_total", description, COUNTER, {}, float(counters.get(name, 0)))
        for name, description in STATED.items():
            yield Measurement(f"recommender_live_{name}", description, GAUGE, {}, float(counters.get(name, 0)))
        if seen_ms := counters.get("kafka_seen_ms"):
            silent_s = max(self.now_ms() - seen_ms, 0) / 1000
            yield Measurement("recommender_live_kafka_silent_seconds", SILENT, GAUGE, {}, silent_s)


class Upsert(LiveModel):
    """`upsert`: an item or a user is new or changed."""

    @property
    def admission(self) -> ChangeAdmission:
        return ChangeAdmission(self.settings.columns)

    def faults(self, inputs: Arrays) -> dict[int, str]:
        """Return a message for each malformed change, by row."""
        return self.admission.faults(inputs)

    def __call__(self, inputs: Arrays) -> Arrays:
        """Serve one batch of `upsert` (serving/contract/tensors.py)."""
        return self.append(self.admission.events(inputs, self.now_ms()))
