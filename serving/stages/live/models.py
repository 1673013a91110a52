"""Serve `observe` and `upsert`, the two models that write the live store.

Both append to the same log. Each has one instance, and LMDB lets one of them write at a time. While a batch becomes durable,
the dynamic batcher collects the next one: group commit.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import numpy as np

from serving.contract.artifacts import StageInfo, find_stage_folder, make_stage_settings, read_stage
from serving.contract.errors import RequestError
from serving.contract.measurements import Histogram, Measurement
from serving.contract.tensors import STAGES
from serving.live.admission import ChangeAdmission, EventAdmission
from serving.live.events import EventBatch, EventKind, EventKinds
from serving.live.layout import Layout
from serving.live.seeds import GenerationSeeds
from serving.live.sequences import mark_sequences
from serving.live.store import DEFAULT_BYTES, find_live_folder, set_aside
from serving.live.writer import Writer, WriterSettings, read_wall_clock_ms
from serving.stages.features.user_files import UserFiles
from serving.stages.live.measurements import KAFKA, REDIS, make_histogram, measure_model, measure_store

Arrays = dict[str, np.ndarray]
Model = TypeVar("Model", bound="LiveModel")


@dataclass(frozen=True)
class LiveSettings:
    """`settings` of stage.json, the same for both models.

    kinds, value_is: the fields of each EventKind, in the order of their codes, and what an event's value means (EventKinds)
    columns: "item" or "user" -> column that `upsert` may change -> its type
    lateness_s: how far the watermark is behind the latest event; ahead_s: how far an event may be ahead of the clock
    key_days, archive_days, archive_bytes, idle_days, most_users, session_hours: see live/maintenance.py
    brokers, topic: Kafka's, from which events are consumed; "" for none
    roles: role of an item's feature column, such as "price" -> the column's name in the data
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
    session_hours: float = 0.0
    roles: Mapping[str, str] = field(default_factory=dict)

    @property
    def event_kinds(self) -> EventKinds:
        return EventKinds(tuple(EventKind(**kind) for kind in self.kinds), self.value_is)

    @property
    def writer_settings(self) -> WriterSettings:
        return WriterSettings(self.lateness_s, self.key_days, self.store_bytes)


@dataclass
class LiveModel:
    """The common base of both models. machine: name of this machine's store"""

    is_shared: ClassVar[bool]  # whether other machines get what this model appends, where they share users by Redis

    info: StageInfo
    writer: Writer
    settings: LiveSettings
    machine: str
    now_ms: Callable[[], int] = read_wall_clock_ms
    times: Histogram = field(default_factory=make_histogram)
    refused: int = 0

    @classmethod
    def load(cls: type[Model], folder: Path, store: Path | None = None) -> Model:
        """Load the model from its version folder. Raises ArtifactError, ConfigError or DependencyError.

        store: folder of a live store to use instead of the repository's own
        """
        info = read_stage(folder)
        settings = make_stage_settings(folder, info, LiveSettings)
        repository = folder.parents[1]
        seeds = cls.open_seeds(repository, info.generation)
        place = store or find_live_folder(repository, info.live_folder)
        if info.shop:
            set_aside(place, info.shop)
        writer = Writer(
            place,
            Layout(history=info.axes.history),
            settings.event_kinds.names,
            seeds,
            settings=settings.writer_settings,
            shop=info.shop,
        )
        return cls(info, writer, settings, writer.name_machine())

    @classmethod
    def open_seeds(cls, repository: Path, generation: int) -> GenerationSeeds | None:
        """Return a generation's first records of users; None for a model that writes no events of users."""
        return None

    def append(self, batch: EventBatch) -> Arrays:
        """Make events durable. Return {"sequence": int64 [N, 1]}."""
        started_s = time.perf_counter()
        try:
            sequences = self.writer.append(batch)
        except RequestError as error:
            self.refused += len(error.rows)
            raise
        self.times.add(time.perf_counter() - started_s)
        sequences = mark_sequences(sequences, self.machine, self.is_shared and bool(self.info.live_redis))
        return {"sequence": sequences.reshape(-1, 1)}

    def count_refused(self, faults: dict[int, str]) -> dict[int, str]:
        """Count faults as refused, and return them."""
        self.refused += len(faults)
        return faults

    def list_measurements(self) -> Iterator[Measurement]:
        """Yield the model's measurements."""
        yield from measure_model(self.info.stage, self.times, self.refused)

    def close(self) -> None:
        self.writer.close()


class Observe(LiveModel):
    """The model `observe`: record interactions."""

    is_shared = True

    @classmethod
    def open_seeds(cls, repository: Path, generation: int) -> GenerationSeeds:
        return GenerationSeeds(UserFiles.open(find_stage_folder(repository, STAGES[0], generation) / "store"))

    @cached_property
    def admission(self) -> EventAdmission:
        return EventAdmission(self.settings.event_kinds, self.info.context, self.settings.ahead_s)

    def find_faults(self, inputs: Arrays) -> dict[int, str]:
        """Return a message for each malformed event, by row."""
        logged_ms = self.writer.store.read_progress().latest_ms
        return self.count_refused(self.admission.find_faults(inputs, self.now_ms(), logged_ms))

    def __call__(self, inputs: Arrays) -> Arrays:
        """Serve one batch of `observe` (serving/contract/tensors.py)."""
        now_ms = self.now_ms()
        batch = self.admission.make_events(inputs, self.writer.codes, now_ms)
        self.admission.check_clock(batch, now_ms)
        return self.append(batch)

    def list_measurements(self) -> Iterator[Measurement]:
        """Yield the model's measurements, and those of the store."""
        yield from super().list_measurements()
        addresses_of = {KAFKA: self.settings.brokers, REDIS: self.info.live_redis}
        backends = [name for name, addresses in addresses_of.items() if addresses]
        yield from measure_store(self.writer.store, self.now_ms(), self.settings.store_bytes, backends)


class Upsert(LiveModel):
    """The model `upsert`: add or change items and users."""

    is_shared = False

    @cached_property
    def admission(self) -> ChangeAdmission:
        return ChangeAdmission(self.settings.columns, self.settings.roles)

    def find_faults(self, inputs: Arrays) -> dict[int, str]:
        """Return a message for each malformed change, by row."""
        return self.count_refused(self.admission.find_faults(inputs))

    def __call__(self, inputs: Arrays) -> Arrays:
        """Serve one batch of `upsert` (serving/contract/tensors.py)."""
        return self.append(self.admission.make_events(inputs, self.now_ms()))
