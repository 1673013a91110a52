"""From new events to served rows: a few steps on the rows of users and items, the network frozen, published to the servers.

    log ─▶ events after the generation's own ─▶ requests as this generation ranks them ─▶ steps on the rows they touch ─▶ Kafka

What is learned from is what the served kernels saw: the published pipeline makes the candidates and their features, and its
tables give the rows as this machine serves them now, with all earlier updates: run it where a server or an updater of the
generation runs. The next export learns everything afresh. Of the merlin profile too: export/nvidia/streaming.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from export.nvidia.streaming import HpsPublisher, HpsRows, MerlinStream
from export.settings import MERLIN
from repository.check import profile_of
from serving.contract.artifacts import stage_folder
from serving.contract.errors import ConfigError, ExportError
from serving.contract.tensors import PAD_ID
from serving.pipeline import Pipeline
from serving.stages.parts.specs import RANK_FEATURES, RANK_ROWS
from serving.stages.rank import Rank
from serving.tables.config import UpdateConfig
from serving.tables.store.mixed_widths import MixedWidths
from serving.tables.store.tiers import Tiers
from serving.tables.updates.publisher import Publisher
from training.models.dlrm import Network, Shape
from training.models.save_ranker import LAYERS_FILE
from training.models.train_ranker import listwise_loss

RESERVED_ROWS = 3  # PAD, NULL and OOV of every table speak for many values: single events do not move them
USERS_PER_BATCH = 256


@dataclass(frozen=True)
class StreamSettings:
    steps: int = 5
    learning_rate: float = 0.05  # of a row, per request that it is part of


@dataclass(frozen=True)
class Batch:
    """Requests of N users as the rank stage saw them, and what these users took since.

    numbers: user_numbers [N, Gu] and pair_numbers [N, C, Gp] of the network; keys: whole table -> int64 [N] of the user,
    [N, C] of the candidates; retrieval: float32 [N, C], what is added to the logits; valid, taken: bool [N, C]
    """

    user_numbers: torch.Tensor
    pair_numbers: torch.Tensor
    keys: dict[str, np.ndarray]
    retrieval: torch.Tensor
    valid: torch.Tensor
    taken: torch.Tensor


@dataclass(frozen=True)
class Streamed:
    """What one run did. loss: before and after, weighted by requests.

    last_event_s: where the next run begins; behind HPS where this one did, as its rows are learned anew from the exported ones
    """

    events: int
    requests: int
    rows: dict[str, int]
    loss: tuple[float, float]
    last_event_s: int


def stream_updates(
    repository: Path,
    interactions: pd.DataFrame,
    since_s: int | None,
    settings: StreamSettings,
    say: Callable[[str], None],
) -> Streamed:
    """Learn from the positive events of `interactions` after `since_s` (default: the generation's own log), and publish.

    Raises ConfigError when the tables have no update source, DependencyError when no broker takes the rows.
    """
    pipeline = MerlinStream(repository) if profile_of(repository) == MERLIN else Pipeline.load(repository)
    try:
        return _stream(pipeline, network_of(pipeline, repository), interactions, since_s, settings, say)
    finally:
        pipeline.close()


def _stream(
    pipeline: Pipeline | MerlinStream,
    network: Network,
    interactions: pd.DataFrame,
    since_s: int | None,
    settings: StreamSettings,
    say: Callable[[str], None],
) -> Streamed:
    rank: Rank = pipeline.stages["rank"]
    publisher = publisher_of(rank.tables)
    since_s = pipeline.stages["preprocess"].embedded.as_of_s if since_s is None else since_s
    new = interactions[interactions["positive"].to_numpy() & (interactions["timestamp"].to_numpy() > since_s)]
    say(f"{len(new):,} new positive events of {new['user_id'].nunique():,} users after {since_s}")
    latest, n_requests, losses, rows = LatestRows(rank.tables), 0, np.zeros(2), dict.fromkeys(rank.tables.names, 0)
    user_ids = new["user_id"].unique()
    for start in range(0, len(user_ids), USERS_PER_BATCH):
        batch = batch_of(pipeline, new, user_ids[start : start + USERS_PER_BATCH])
        if batch is None:
            continue
        learned, loss = learn(rank, network, batch, latest, settings)
        for table, (keys, vectors) in learned.items():
            publisher.publish(table, keys, vectors)
            latest.set(table, keys, vectors)
            rows[table] += len(keys)
        publisher.flush()
        n_requests += len(batch.taken)
        losses += len(batch.taken) * np.array(loss)
    loss = tuple((losses / max(n_requests, 1)).tolist())
    say(f"{n_requests:,} requests taught, loss {loss[0]:.3f} -> {loss[1]:.3f}, rows published: {rows}")
    again_from = since_s if isinstance(rank.tables, HpsRows) or not len(new) else int(new["timestamp"].max())
    return Streamed(len(new), n_requests, rows, loss, again_from)


def publisher_of(tables: Tiers | HpsRows) -> Publisher | HpsPublisher:
    """Raises ConfigError when the tables have no update source."""
    if isinstance(tables, HpsRows):
        return HpsPublisher(tables, source_of(tables.updates).brokers)
    config = tables.config
    widths = {table.name: table.width for table in config.tables}
    return Publisher(source_of(config.updates).brokers, config.model, widths)


def source_of(updates: UpdateConfig | None) -> UpdateConfig:
    if updates is None:
        raise ConfigError(
            "This generation's tables have no update source. Expected brokers. Export with [tables] brokers in the settings."
        )
    return updates


def network_of(pipeline: Pipeline | MerlinStream, repository: Path) -> Network:
    """The ranker's network in torch, frozen, from its published layers."""
    rank: Rank = pipeline.stages["rank"]
    with np.load(rank_folder(repository, pipeline.info.generation) / LAYERS_FILE) as file:
        layers = {name: torch.from_numpy(file[name]) for name in file.files}
    widths = {
        part: tuple(len(layers[f"{part}{i}.bias"]) for i in range(sum(n.startswith(part) for n in layers) // 2))
        for part in ("bottom", "top")
    }
    n_user_numbers = pipeline.info.axes.user_continuous
    tables = (dict.fromkeys(names, 0) for names in (rank.settings.user_tables, rank.settings.item_tables))
    n_numbers = len(layers["bottom0.weight"])
    shape = Shape(
        *tables, n_user_numbers, n_numbers - n_user_numbers, widths["bottom"][-1], widths["bottom"][:-1], widths["top"][:-1]
    )
    network = Network(shape)
    network.folded = True
    for part, linears in (("bottom", network.bottom), ("top", network.top)):
        for i, linear in enumerate(linears):
            linear.weight.data, linear.bias.data = layers[f"{part}{i}.weight"].T.contiguous(), layers[f"{part}{i}.bias"]
    return network.requires_grad_(False).eval()


def rank_folder(repository: Path, generation: int) -> Path:
    """Where the ranker's weights are: in a merlin repository beside the part that knows its rows."""
    parts = [repository / name for name in (RANK_FEATURES, RANK_ROWS) if (repository / name).is_dir()]
    return parts[0] / str(generation) if parts else stage_folder(repository, "rank", generation)


def batch_of(pipeline: Pipeline | MerlinStream, events: pd.DataFrame, user_ids: np.ndarray) -> Batch | None:
    """The users' requests as they are answered now; None when nobody took one of their candidates."""
    rank: Rank = pipeline.stages["rank"]
    tensors = pipeline.trace({"user_id": user_ids[:, None]})
    candidate_ids = tensors["candidate_ids"]
    own = events[events["user_id"].isin(user_ids)]
    places = {user: row for row, user in enumerate(user_ids.tolist())}
    taken = np.zeros(candidate_ids.shape, bool)
    for user, item in zip(own["user_id"].tolist(), own["item_id"].tolist(), strict=True):
        taken[places[user]] |= candidate_ids[places[user]] == item
    teaching = np.flatnonzero(taken.any(axis=1))
    if not len(teaching):
        return None
    inputs = {name: values[teaching] for name, values in tensors.items()}
    candidates = rank.items.positions(inputs["candidate_ids"])
    pairs = rank.pair_numbers(inputs, candidates)
    keys = {name: inputs["user_categorical"][:, slot] for slot, name in enumerate(rank.settings.user_tables)}
    keys |= {name: rank.item_rows[candidates, slot] for slot, name in enumerate(rank.settings.item_tables)}
    return Batch(
        torch.from_numpy(inputs["user_continuous"]),
        torch.from_numpy(pairs),
        {name: own_keys.astype(np.int64) for name, own_keys in keys.items()},
        torch.from_numpy(np.float32(rank.settings.blend) * rank.retrieval_part(pairs)),
        torch.from_numpy(inputs["candidate_ids"] != PAD_ID),
        torch.from_numpy(taken[teaching]),
    )


class LatestRows:
    """Rows as they are served, or as this run has published them: those may still be on their way."""

    def __init__(self, tables: Tiers | HpsRows) -> None:
        self._tables = tables
        self._published: dict[str, dict[int, np.ndarray]] = {name: {} for name in tables.names}

    def set(self, table: str, keys: np.ndarray, vectors: np.ndarray) -> None:
        self._published[table].update(zip(keys.tolist(), vectors, strict=True))

    def lookup(self, table: str, keys: np.ndarray) -> np.ndarray:
        """int64 [N] distinct keys -> float32 [N, D]"""
        vectors, own = self._tables.lookup(table, keys), self._published[table]
        for row, key in enumerate(keys.tolist()):
            if key in own:
                vectors[row] = own[key]
        return vectors


Learned = dict[str, tuple[np.ndarray, np.ndarray]]
"""table -> (int64 [N] keys, float32 [N, width] rows)"""


class TouchedRows:
    """The rows that a batch is about, as they are stored: the tables' parameters, widened only for the network."""

    def __init__(self, widths: MixedWidths, batch: Batch, latest: LatestRows) -> None:
        distinct = {name: np.unique(keys, return_inverse=True) for name, keys in batch.keys.items()}
        self._places = {name: torch.from_numpy(at.reshape(batch.keys[name].shape)) for name, (_, at) in distinct.items()}
        self._parts = {
            name: [part for part in widths.split(name, keys) if len(part.keys)] for name, (keys, _) in distinct.items()
        }
        parts = [part for own in self._parts.values() for part in own]
        self._keys = {part.table: part.keys for part in parts}
        self._before = {part.table: latest.lookup(part.table, part.keys) for part in parts}
        self._free = {part.table: torch.from_numpy(part.keys + part.first >= RESERVED_ROWS)[:, None] for part in parts}
        self._rows = {table: torch.tensor(rows, requires_grad=True) for table, rows in self._before.items()}

    def of(self, names: tuple[str, ...]) -> torch.Tensor:
        """Whole tables in slot order -> float32 [N, S, D] of the user, [N, C, S, D] of the candidates."""
        return torch.stack([self._wide(name)[self._places[name]] for name in names], dim=-2)

    def _wide(self, name: str) -> torch.Tensor:
        """Of the distinct keys of a whole table, rising, [U, D]."""
        rows = [(self._rows[part.table], part.projection) for part in self._parts[name]]
        return torch.cat([own if wide is None else own @ torch.from_numpy(wide) for own, wide in rows])

    def step(self, loss: torch.Tensor, learning_rate: float) -> None:
        gradients = torch.autograd.grad(loss, list(self._rows.values()))
        with torch.no_grad():
            for (table, rows), gradient in zip(self._rows.items(), gradients, strict=True):
                rows -= learning_rate * gradient * self._free[table]

    def moved(self) -> Learned:
        learned = {}
        for table, rows in self._rows.items():
            after = rows.detach().numpy()
            moved = (after != self._before[table]).any(axis=1)
            if moved.any():
                learned[table] = self._keys[table][moved], after[moved]
        return learned


def learn(
    rank: Rank, network: Network, batch: Batch, latest: LatestRows, settings: StreamSettings
) -> tuple[Learned, tuple[float, float]]:
    """Gradient steps on the rows of the batch.

    -> (rows that moved, (loss before, after)). Raises ExportError when it diverges.
    """
    rows = TouchedRows(rank.widths, batch, latest)

    def loss() -> torch.Tensor:
        user_rows, item_rows = rows.of(rank.settings.user_tables), rows.of(rank.settings.item_tables)
        logits = network(batch.user_numbers, user_rows, batch.pair_numbers, item_rows)
        return listwise_loss(logits + batch.retrieval, batch.taken, batch.valid)

    losses = []
    for _ in range(settings.steps):
        value = loss()
        losses.append(value.item())
        rows.step(value * len(batch.taken), settings.learning_rate)  # a row moves by its own requests
    with torch.no_grad():
        losses.append(loss().item())
    if not np.isfinite(losses[-1]):
        raise ExportError("The steps on the new events diverged; nothing of them was published. Lower the learning rate.")
    return rows.moved(), (losses[0], losses[-1])
