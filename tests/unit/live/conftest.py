"""A live store, and a repository to change."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pandas as pd
import pytest

from live.archive import compact
from live.backup import back_up
from live.erase import erase_user
from serving.contract.tensors import OBSERVE, UPSERT
from serving.live.layout import Layout
from serving.live.reader import Reader
from serving.live.shared.redis_state import PATIENT_S, RedisState
from serving.live.store import find_live_folder
from serving.live.writer import Writer
from serving.pipeline import Pipeline
from serving.stages.live.models import Observe, Upsert
from tests.repositories import copy_to_change
from tests.unit.live.batches import KINDS, START_MS, purchase
from tests.unit.live.redis.redis_machines import PROJECT
from tests.unit.live.shops import repository_with_kinds
from tests.unit.live.toy_log import add_newcomer, load_toy
from tests.unit.tables.redis_server import RedisServer
from training.dataset import Dataset


class Clock:
    """A wall clock that stands still until a test sets `ms`."""

    def __init__(self) -> None:
        self.ms = START_MS

    def __call__(self) -> int:
        return self.ms


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def folder(tmp_path) -> Path:
    return tmp_path / "model_repository.live"


@pytest.fixture
def writer(folder, clock):
    writer = Writer(folder, Layout(), KINDS.names, now_ms=clock)
    yield writer
    writer.close()


@pytest.fixture
def replaceable(folder, tmp_path) -> Path:
    """Return a backup of the first event of a store that has two. Both have three parts besides the data file."""
    with closing(Writer(folder, Layout(), KINDS.names)) as writer:
        writer.append(purchase(7, 1))
        compact(writer, older_than_ms=writer.now_ms() + 1)
        erase_user(writer, 8)
        back_up(folder, tmp_path / "backup")
        writer.append(purchase(7, 2))
    return tmp_path / "backup"


@pytest.fixture
def repository(tmp_path) -> Path:
    return copy_to_change(repository_with_kinds(), tmp_path / "repository")


@pytest.fixture
def toy(tmp_path) -> Dataset:
    return load_toy(tmp_path / "data")


@pytest.fixture
def toy_log(toy: Dataset) -> pd.DataFrame:
    """The log of the toy data set, with a user who comes after the export."""
    return add_newcomer(toy.interactions)


@pytest.fixture
def log_reader(tmp_path) -> Iterator[Reader]:
    """Reads a store that does not exist yet."""
    with closing(Reader(tmp_path / "live")) as reader:
        yield reader


@pytest.fixture
def reader(repository):
    reader = Reader(find_live_folder(repository))
    yield reader
    reader.close()


@pytest.fixture
def pipeline(repository, reader) -> Pipeline:
    return Pipeline.load(repository, live=reader)


@pytest.fixture
def observe(repository):
    stage = Observe.load(repository / OBSERVE / "1")
    yield stage
    stage.close()


@pytest.fixture
def upsert(repository):
    stage = Upsert.load(repository / UPSERT / "1")
    yield stage
    stage.close()


@pytest.fixture
def redis(empty_redis: RedisServer) -> RedisServer:
    return empty_redis


@pytest.fixture
def state(redis: RedisServer) -> Iterator[RedisState]:
    """The state that machines share in an empty Redis."""
    state = RedisState(redis.address, PROJECT, PATIENT_S)
    yield state
    state.close()
