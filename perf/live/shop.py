"""A shop to measure: a server on a copy of a repository with a live store of its own, its users, and its requests as bytes."""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tritonclient.grpc import service_pb2 as pb

from perf.answers import read_tensors
from perf.load.workload import Arrays, read_requests, read_specs, serialise
from perf.target import Site, own_server, read_site
from perf.tune.variant import remove_live_models
from server.start.environment import MEASURED_DIR
from serving.contract.artifacts import find_stage_folder, read_stage
from serving.contract.errors import ConfigError
from serving.contract.generations import read_pinned_generation
from serving.contract.tensors import (
    ENSEMBLE,
    OBSERVE,
    PAD_ID,
    STAGES,
    UPSERT,
    Degraded,
    ModelSpec,
    make_live_specs,
)
from serving.live.store import find_live_folder
from serving.stages.features.ids import ItemIndex
from serving.stages.features.user_store import UserStore


@dataclass(frozen=True)
class Answer:
    """One answer of `recommend`. item_ids: int64 [n], without padding"""

    item_ids: list[int]
    degraded: int

    @property
    def is_current(self) -> bool:
        """Whether the answer reflects all live events, as its `degraded` says."""
        return not self.degraded & Degraded.LIVE


@dataclass(frozen=True)
class Shop:
    """One server, and the requests to it.

    user_ids, item_ids: int64 [n], those that the generation knows; requests: recorded ones, [R, *dims] by tensor
    """

    site: Site
    specs: dict[str, ModelSpec]
    user_ids: np.ndarray
    item_ids: np.ndarray
    requests: Arrays

    @classmethod
    def of(cls, site: Site) -> Shop:
        first = find_stage_folder(site.repo, STAGES[0], site.generation)
        return cls(
            site,
            read_specs(site.repo, site.generation) | make_live_specs(),
            np.array(UserStore(first / "store").user_ids),
            np.array(ItemIndex.load(first / "item_ids.npy").ids),
            read_requests(site.repo, site.generation),
        )

    @property
    def live_folder(self) -> Path:
        return find_live_folder(self.site.repo)

    def draw_users(self, count: int, rng: np.random.Generator) -> np.ndarray:
        """Return int64 [count] known users; none is repeated before all were drawn."""
        rounds = -(-count // len(self.user_ids))
        return np.concatenate([rng.permutation(self.user_ids) for _ in range(rounds)])[:count]

    def encode_recommend(self, user_id: int, after: int | None = None) -> bytes:
        """Return an encoded request of `recommend`; the other tensors have their fill values."""
        values = {"user_id": user_id} if after is None else {"user_id": user_id, "after": after}
        spec = self.specs[ENSEMBLE]
        return serialise(spec, spec.fill_optional(1) | {name: np.array([[value]]) for name, value in values.items()})[0]

    def encode_observe(self, user_ids: Sequence[int], item_ids: Sequence[int], event_ids: Sequence[str] = ()) -> bytes:
        """Return an encoded request of `observe` with an event of each user and item."""
        columns = {"user_id": np.asarray(user_ids, np.int64), "item_id": np.asarray(item_ids, np.int64)}
        return encode(OBSERVE, columns | ({"event_id": [text.encode() for text in event_ids]} if event_ids else {}))

    def encode_upsert(self, item_id: int, **columns: object) -> bytes:
        """Return an encoded request of `upsert` that changes columns of an item."""
        texts = {"kind": [b"item"], "columns": [json.dumps(columns).encode()]}
        return encode(UPSERT, texts | {"id": np.array([item_id], np.int64)})

    def read_answer(self, message: bytes) -> Answer:
        """Read an answer of `recommend`."""
        tensors = read_tensors(self.specs[ENSEMBLE], [message])
        ids = tensors["item_ids"][0]
        return Answer(ids[ids != PAD_ID].tolist(), int(tensors["degraded"][0, 0]))


def encode(model: str, columns: dict[str, np.ndarray | list[bytes]]) -> bytes:
    """Return an encoded ModelInferRequest of columns [N], each a tensor [N, 1] of int64 or of texts."""
    request = pb.ModelInferRequest(model_name=model)
    for name, values in columns.items():
        is_text = isinstance(values, list)
        request.inputs.add(name=name, datatype="BYTES" if is_text else "INT64", shape=[len(values), 1])
        raw = b"".join(len(v).to_bytes(4, "little") + v for v in values) if isinstance(values, list) else values.tobytes()
        request.raw_input_contents.append(raw)
    return request.SerializeToString()


def read_sequences(message: bytes) -> np.ndarray:
    """Return the sequences, int64 [N], in an answer of `observe` or `upsert`."""
    return np.frombuffer(pb.ModelInferResponse.FromString(message).raw_output_contents[0], np.int64)


@contextlib.contextmanager
def copy_repository(repo: Path, live: bool = True) -> Iterator[Path]:
    """Yield a copy of a repository, with a live store of its own. live: False leaves out `observe` and `upsert`

    Raises ConfigError for a repository that states where its live store is: the copy would write there.
    """
    generation = read_pinned_generation(repo)
    live_folder = read_stage(find_stage_folder(repo, OBSERVE, generation)).live_folder
    if live_folder:
        raise ConfigError(
            f"{repo} keeps its live store in {live_folder}, where the made-up events of a measurement would be written. "
            "Export without [live] folder, and measure that."
        )
    MEASURED_DIR.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="live-", dir=MEASURED_DIR) as scratch:
        copy = Path(shutil.copytree(repo, Path(scratch) / repo.resolve().name))
        if not live:
            remove_live_models(copy, generation)
        yield copy


@contextlib.contextmanager
def serve_copy(copy: Path) -> Iterator[Shop]:
    """Serve a copy of a repository during the block."""
    with own_server(copy) as server:
        yield Shop.of(read_site(server.state))


@contextlib.contextmanager
def open_shop(repo: Path, live: bool = True) -> Iterator[Shop]:
    """Serve a copy of a repository, as `copy_repository` makes it."""
    with copy_repository(repo, live) as copy, serve_copy(copy) as shop:
        yield shop
