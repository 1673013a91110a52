"""The settings of an export: one typed TOML file, in which every key has a sensible default.

docs/settings.md is written from the classes here (`make docs`), from their docstrings and the comments behind their keys.

    [pipeline]  sizes of the contract and what retrieval filters
    [serving]   how Triton runs the models; [serving.rank] etc. override it for one model
    [ranker]    the ranking network, and the width of its embedding tables
    [compute]   threads of the ranker's network, and the search effort of the index (`make tune` finds them)
    [rules]     the shop's business rules (serving/stages/rules/config.py)
    [training]  models that are tried, and how much work they may be
    [dask]      a cluster that fits NVTabular
    [hugectr]   a ranker that HugeCTR trained
    [live]      how events are accepted, and where they are stored (serving/live)
    [merlin]    where and how the merlin profile is served (export/merlin_settings.py)
    [tables]    budgets of the ranker's embedding tables, and their update source (export/tables.py)

The settings are recorded in the manifest of the generation.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from export.merlin_settings import MerlinSettings
from hps_config.checks import MAX_WORKER_BUFFERS
from hps_config.description import Bytes
from hps_config.tables import RowFormat
from repository.toml_files import describe_unknown_key, open_toml, refuse_unknown_keys
from repository.triton.config import WARMUP_ROWS, Serving
from serving.contract.artifacts import MANIFEST_FILE, find_stage_folder, read_json
from serving.contract.errors import ArtifactError, ConfigError
from serving.contract.generations import read_pinned_generation
from serving.contract.tensors import ENSEMBLE, LIVE_MODELS, STAGES
from serving.stages.rules.config import RulesConfig
from serving.tables.config import RedisConfig

# `recommend` of the fused layout runs all stages. Without a preferred size, the first free process would take the whole queue,
# and the other one would wait for new requests
FUSED = {"instances": 2, "preferred_batch_sizes": (16,)}

MOST_INSTANCES = MAX_WORKER_BUFFERS  # each has a buffer of its own in the pool of ps.json
MOST_THREADS = 1_024  # ONNX Runtime starts as many as the setting says, and fails if memory does not suffice
MOST_WHOLE = 2**31 - 1  # of the numbers in config.pbtxt, some of which have 32 bits

EVENTS_AT_ONCE = 1_024  # most events in one transaction of the live store
LEAST_STORE_BYTES, MOST_STORE_BYTES = 16 << 20, 64 << 40  # a process has 128 TiB of address space

PositiveInt = Annotated[int, Field(gt=0)]
Length = Annotated[int, Field(gt=0, le=10_000)]  # of an axis that every request has
RecordedRequests = Annotated[int, Field(ge=WARMUP_ROWS, le=100_000)]
Seed = Annotated[int, Field(ge=0, le=2**32 - 1)]  # what NumPy, scikit-learn and torch all take


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class PipelineSettings(_Section):
    """Sizes of the contract (serving/contract/tensors.py), and the filter of seen items."""

    candidates: Length = 256  # items that retrieval passes to the ranker, and that `among` may name (C)
    history: Length = 64  # latest items of a user that the models read (H)
    exclusions: Length = 64  # item ids that a request may exclude (E)
    items_returned: Length = 20  # items in an answer (K)
    filter_seen: bool = True  # items the user already had are not recommended again, unless `among` names them
    seed: Seed = 0  # random seed of the export
    recorded_requests: RecordedRequests = 1_000  # how many are published with their answers, for warm-up and checks

    @model_validator(mode="after")
    def _lists_can_be_full(self) -> PipelineSettings:
        if self.candidates < self.items_returned:
            raise ValueError(
                f"candidates is {self.candidates}, fewer than the {self.items_returned} items_returned; "
                "every list would be short. Raise candidates"
            )
        return self


def check_nodes(redis: str) -> str:
    """Return the addresses of Redis nodes, "host:port,…" or empty. Raises ValueError when they are none."""
    if redis:
        try:
            RedisConfig(redis)
        except ConfigError as error:
            raise ValueError(str(error)) from error
    return redis


def check_brokers(brokers: str) -> str:
    """Return the addresses of Kafka brokers, "host:port,…" or empty. Raises ValueError when they are none."""
    for broker in brokers.split(",") if brokers else []:
        host, _, port = broker.strip().rpartition(":")
        if not (host and port.isdecimal() and 0 < int(port) < 1 << 16):
            raise ValueError(f"{broker!r} is no address. Expected host:port, or several of them separated by commas")
    return brokers


Nodes = Annotated[str, AfterValidator(check_nodes)]
Brokers = Annotated[str, AfterValidator(check_brokers)]


class TableSettings(_Section):
    """Budgets of the ranker's embedding tables by level (serving/tables), and their update source."""

    l1: Bytes = 64 << 20  # hot rows, in each process
    l2: Bytes = 4 << 30  # rows in memory, one copy for all processes of a machine
    l3: Bytes = 64 << 30  # RocksDB on disk, used when l2 is too small for all rows, or with live updates
    row_format: RowFormat = "fp32"  # format of the rows in l2
    row_formats: dict[str, RowFormat] = {}  # formats by table name, where they differ from row_format
    hit_rate_threshold: Annotated[float, Field(ge=0)] = 1.1  # above 1 every miss is waited for; below, defaults may answer
    redis: Nodes = ""  # "host:port,…": nodes of a Redis cluster that takes the place of l2
    brokers: Brokers = ""  # "host:port,…": Kafka brokers; rows are then updated while they are served
    state: str = ""  # folder of RocksDB on the serving machine; empty: in its temporary folder


TAUGHT_WIDTH, STUDENT_WIDTH = 16, 4  # of embedding tables
Width = Annotated[int, Field(ge=0, le=1_024)]


class RankerChoice(_Section):
    """The ranking network: the DLRM itself, or a smaller one that imitates it (docs/models.md).

    The default one keeps the quality with a fifteenth of the arithmetic. If validation shows that a smaller one does not keep
    it, the export serves the network that it was made from and reports it.
    """

    compression: Literal["none", "distilled", "pruned", "int8"] = "distilled"  # how the served network is made smaller
    width: Width = 0  # values per row of the embedding tables; 0: 16 with compression "none", else 4


class TrainingSettings(_Section):
    """Models that are tried. Validation on the end of the log chooses; the manifest holds the comparison.

    `minutes` is an amount of work, in minutes of two free cores. It decides which models are tried, and how often a sequence
    model may read the log. No clock stops a training: a busy machine takes longer, and makes the same models from the same
    seed. What every export trains (item-item neighbours, towers, ranker and re-ranker) comes on top.

    A sequence model is tried on logs of 20,000 positive events to 33,000 per minute: others are too small for it, or too large
    for the minutes. It takes a fifth of the minutes, and as much again where it serves. A graph model is tried on logs of up to
    500,000 positive events per minute. Two more teachers of the ranker are tried with up to 300 training requests per minute;
    one that teaches with live events and without counts twice. In `export follow` a sequence model and the ranker start from
    the weights of the generation before; with changed columns or aggregations, the ranker learns from scratch.
    """

    sequence: Literal["auto", "never"] = "auto"  # serve a sequence model where it finds more, or try none
    graph: Literal["auto", "never"] = "auto"  # serve a graph model where it finds more, or try none
    teachers: Literal["auto", "one"] = (
        "auto"  # what a small ranker learns from: several networks if they are better, or only the DLRM
    )
    minutes: Annotated[float, Field(gt=0)] = 6.0  # work on two free cores: decides which models are tried, and is no time limit
    scratch_every: PositiveInt = 10  # one in so many generations of `export follow` learns from scratch; 1: all of them


class ComputeSettings(_Section):
    """Threads and search effort. `make tune` finds values for a machine."""

    rank_threads: Annotated[int, Field(gt=0, le=MOST_THREADS)] = 1  # threads of the ranker's network, in each instance
    index_effort: Annotated[int, Field(ge=0)] = (
        0  # lists of the index searched per query; 0: the fewest that reach the required recall
    )


class LiveChoices(_Section):
    """Acceptance and storage of events (serving/live)."""

    folder: str = ""  # folder of the live store, an absolute path; empty: beside the repository, <REPO>.live
    lateness_s: Annotated[float, Field(ge=0)] = 10.0  # lag of the clock behind the latest event
    ahead_s: Annotated[float, Field(ge=0)] = 300.0  # events further ahead of the server's clock are refused
    key_days: Annotated[float, Field(gt=0)] = 7.0  # how long event ids are known; older events move into the archive
    archive_days: Annotated[float, Field(ge=0)] = 0.0  # how long the archive keeps events; 0: for ever
    archive_bytes: Bytes = 64 << 30  # beyond it the archive's oldest segments are removed; 0: no bound
    idle_days: Annotated[float, Field(ge=0)] = 365.0  # a user without an event for so long is forgotten; 0: never
    most_users: Annotated[int, Field(ge=0)] = 10_000_000  # beyond it the longest idle users are forgotten; 0: no bound
    session_hours: Annotated[float, Field(ge=0)] = 48.0  # an anonymous session idle for so long is forgotten; 0: as users are
    store_bytes: Bytes = 64 << 30  # size at which the store is full, 16 MiB to 64 TiB; the file grows as it is used
    brokers: Brokers = ""  # "host:port,…": Kafka brokers, from which events come too
    topic: str = "events"  # their topic
    redis: Nodes = ""  # "host:port,…": nodes of a Redis cluster in which many machines share users' state, in Feast's layout
    feast_project: str = "recommender"  # name of the project in Feast's keys
    continue_log: bool = True  # an export learns from the events of the live store too
    new_items: Annotated[int, Field(ge=0, le=10_000_000)] = 4_096  # rows kept free for items that come between two exports
    new_item_share: Annotated[float, Field(ge=0, le=1)] = 0.1  # share of lists that show a new item, whatever its scores
    new_item_place: Annotated[int, Field(ge=0)] = 9  # where they show it; 0 is the top

    @field_validator("store_bytes")
    @classmethod
    def _is_mapped(cls, store_bytes: int) -> int:
        if store_bytes < LEAST_STORE_BYTES:
            raise ValueError(f"{store_bytes:,} bytes are full after a few events. Expected 16 MiB or more, such as the default")
        if store_bytes > MOST_STORE_BYTES:
            raise ValueError(f"no process can map {store_bytes:,} bytes. Expected 64 TiB or less, such as the default")
        return store_bytes

    @field_validator("topic", "feast_project")
    @classmethod
    def _refuse_blank(cls, name: str) -> str:
        if not name.strip():
            raise ValueError(f"{name!r} names nothing. Write a name, or leave the key out for the default")
        return name.strip()

    @field_validator("folder")
    @classmethod
    def _absolute(cls, folder: str) -> str:
        if folder and not Path(folder).is_absolute():
            raise ValueError(f"{folder!r} is a relative path, which a server would seek elsewhere. Write it from / on")
        return folder


class DaskSettings(_Section):
    """A Dask cluster that fits NVTabular, for logs whose training columns outgrow one machine (docs/operating.md)."""

    scheduler: str = ""  # address, "tcp://host:8786" or "tls://host:8786"; empty: this process fits
    folder: str = ""  # folder for training rows and vocabularies: an absolute path that this process and all workers share

    @model_validator(mode="after")
    def _can_be_reached(self) -> DaskSettings:
        if self.scheduler and not re.fullmatch(r"(tcp|tls)://.+:\d+", self.scheduler):
            raise ValueError(f"scheduler is {self.scheduler!r}. Expected an address like tcp://host:8786")
        if self.scheduler and not Path(self.folder).is_absolute():
            raise ValueError(
                f"folder is {self.folder!r}, but scheduler is set. Name a folder that this process and all Dask workers share, "
                "from / on"
            )
        return self


class HugectrSettings(_Section):
    """A DLRM that HugeCTR trained replaces the one that is trained here (docs/merlin.md)."""

    model: str = ""  # folder of its files; empty: train here
    name: str = "dlrm"  # prefix of its file names


class Settings(_Section):
    pipeline: PipelineSettings = PipelineSettings()
    serving: dict[str, Any] = {}
    ranker: RankerChoice = RankerChoice()
    compute: ComputeSettings = ComputeSettings()
    rules: dict[str, Any] = {}
    tables: TableSettings = TableSettings()
    merlin: MerlinSettings = MerlinSettings()
    training: TrainingSettings = TrainingSettings()
    dask: DaskSettings = DaskSettings()
    hugectr: HugectrSettings = HugectrSettings()
    live: LiveChoices = LiveChoices()

    @model_validator(mode="after")
    def _imported_network_is_served_as_it_is(self) -> Settings:
        if self.hugectr.model and self.ranker.compression in ("pruned", "int8"):
            raise ValueError(
                f'[ranker] compression is "{self.ranker.compression}", but the ranker is HugeCTR\'s, which is served as it is. '
                "Leave compression or [hugectr] out"
            )
        return self

    @model_validator(mode="after")
    def _new_items_are_within_the_list(self) -> Settings:
        place, length = self.live.new_item_place, self.pipeline.items_returned
        if length <= place != LiveChoices.model_fields["new_item_place"].default:  # shorter lists show them at their end
            raise ValueError(
                f"[live] new_item_place is {place}. Expected 0 to {length - 1}, because [pipeline] items_returned is {length}. "
                "Lower it, or leave it out"
            )
        return self

    @property
    def compression(self) -> str:
        """Return the compression that is done; a ranker that HugeCTR trained is served as it is."""
        return "none" if self.hugectr.model else self.ranker.compression

    @property
    def table_width(self) -> int:
        """The width of the served tables, unless the DLRM (TAUGHT_WIDTH or wider) replaces its student."""
        return self.ranker.width or (TAUGHT_WIDTH if self.compression == "none" else STUDENT_WIDTH)

    def merge_serving(self) -> dict[str, Serving]:
        """Return the serving settings of every model, by name."""
        names = (*STAGES, *LIVE_MODELS, ENSEMBLE)
        common = {key: value for key, value in self.serving.items() if key not in names}
        base = change_serving(Serving(), common, "serving")
        defaults = dict.fromkeys(names, base) | dict.fromkeys(LIVE_MODELS, Serving(max_batch_size=EVENTS_AT_ONCE))
        fused: dict[str, Any] = {key: value for key, value in FUSED.items() if key not in common}
        defaults[ENSEMBLE] = replace(base, **fused)
        return {
            name: change_serving(default, self.serving.get(name, {}), f"serving.{name}") for name, default in defaults.items()
        }


def change_serving(base: Serving, changes: Any, section: str) -> Serving:
    """Return `base` with some fields changed. Raises ConfigError naming the section and the key."""
    if not isinstance(changes, Mapping):
        raise ConfigError(f"{section} is {changes!r}. Expected a section: [{section}], with keys such as instances.")
    allowed = asdict(base)
    for key, value in changes.items():
        if key not in allowed:
            raise ConfigError(
                f"{describe_unknown_key(section, key, allowed)} A model's own are in [serving.rank] and the like."
            )
        least, most = 1 if key in ("instances", "max_batch_size") else 0, MOST_INSTANCES if key == "instances" else MOST_WHOLE
        if key == "preferred_batch_sizes":
            good = isinstance(value, list) and all(type(size) is int and size > 0 for size in value)
        else:
            good = type(value) is type(allowed[key]) and least <= value <= most
        if not good:
            kinds = {bool: "true or false", int: f"a whole number from {least} to {most}"}
            kind = kinds.get(type(allowed[key]), "whole numbers above 0, in brackets")
            raise ConfigError(f"[{section}] {key} is {value!r}. Expected {kind}; the default is {json.dumps(allowed[key])}.")
    typed: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in changes.items()}
    changed = replace(base, **typed)
    sizes = changes.get("preferred_batch_sizes")
    if sizes and min(sizes) > changed.max_batch_size:
        raise ConfigError(
            f"[{section}] preferred_batch_sizes is {sizes}, but no batch is larger than max_batch_size, which is "
            f"{changed.max_batch_size}. Raise max_batch_size, or lower them."
        )
    if changed.priority_levels and not 1 <= changed.default_priority <= changed.priority_levels:
        raise ConfigError(
            f"[{section}] default_priority is {changed.default_priority}. Expected 1 to priority_levels, "
            f"which is {changed.priority_levels}."
        )
    return changed


def with_triton(settings: Settings, triton: str) -> Settings:
    """Return the settings for another Triton (of the merlin profile); "" changes nothing. Raises ConfigError."""
    if not triton:
        return settings
    try:
        return settings.model_copy(update={"merlin": MerlinSettings(**{**settings.merlin.model_dump(), "triton": triton})})
    except ValidationError as error:
        raise ConfigError(f"TRITON is {triton!r}. Expected 24.03, the last with HPS, or modern.") from error


def read_settings(path: Path | None) -> Settings:
    """Return the settings of a TOML file, or the defaults. Raises ConfigError with file, key and allowed values."""
    if path is None:
        return Settings()
    with open_toml(path, "docs/settings.md lists the keys and their defaults") as document:
        refuse_unknown_keys(document, Settings)
        settings = Settings.model_validate(document)
        settings.merge_serving()
        RulesConfig.from_dict(settings.rules)  # refused here, before a log is read
    return settings


def read_exported_settings(folder: Path, manifest: Mapping[str, Any]) -> Settings:
    """Return the settings that a generation was exported with. Raises ArtifactError for those of another version.

    folder: of the generation's ensemble; manifest: what that folder's holds
    """
    try:
        return Settings.model_validate(manifest["settings"])
    except ValidationError as error:
        keys = ", ".join(".".join(map(str, fault["loc"])) for fault in error.errors())
        raise ArtifactError(
            f"{folder} was exported by another version of this project, with settings that this one does not know: {keys}. "
            "Export again."
        ) from error


def read_served_settings(repository: Path) -> Settings:
    """Return the settings that the answering generation was exported with. Raises ArtifactError."""
    folder = find_stage_folder(repository, ENSEMBLE, read_pinned_generation(repository))
    return read_exported_settings(folder, read_json(folder, MANIFEST_FILE))
