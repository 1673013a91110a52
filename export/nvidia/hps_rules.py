"""Check an exported repository against the rules of the `hps` backend (hps.cc, model_state.cpp, model_instance_state.cpp)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
from tritonclient.grpc import model_config_pb2 as pb

from export.nvidia.hps import PS_FILE, read_uses
from export.nvidia.pipeline import map_to_host
from hps_config.memory import count_hps_sets, fit_refresh_share, refreshes_whole_sets
from hps_config.ps_config import ModelParams, PsConfig
from serving.contract.artifacts import open_array
from serving.stages.parts.specs import HPS_OUTPUT, KEYS, NUMKEYS, RANK_EMBEDDINGS, PartSettings
from serving.tables.formats.rows import KEY_BYTES
from serving.tables.formats.sparse_folder import read_sparse_folder

KNOWN_PARAMETERS = {"refresh_interval", "refresh_delay", "freeze_sparse"}  # of config.pbtxt, that the backend reads
CHUNK_ROWS = 1 << 16
ROUNDING = 1e-6  # of use counts, whose last digits may differ between machines
TENSORS = {KEYS: pb.TYPE_INT64, NUMKEYS: pb.TYPE_INT32}


def find_tensor_faults(config: pb.ModelConfig) -> Iterator[str]:
    """Yield violations of what the backend checks when it loads the model, and batching that it cannot do."""
    inputs = {tensor.name: tensor.data_type for tensor in config.input}
    if inputs != TENSORS:
        kinds = {name: pb.DataType.Name(kind) for name, kind in inputs.items()}
        yield f"Its inputs are {kinds}; the backend takes {KEYS} TYPE_INT64 and {NUMKEYS} TYPE_INT32 only"
    if [tensor.data_type for tensor in config.output] != [pb.TYPE_FP32]:
        yield "Its outputs are not one tensor of TYPE_FP32"
    for tensor in (*config.input, *config.output):
        if not tensor.dims or tensor.dims[0] != -1:
            yield f"{tensor.name} has the dims {list(tensor.dims)}; the backend requires -1 as the first"
    if any(len(tensor.dims) + (config.max_batch_size > 0) != 2 for tensor in config.input):
        yield f"{KEYS} and {NUMKEYS} do not arrive with two axes; the backend reads the second"
    if config.HasField("dynamic_batching"):
        yield "dynamic_batching: rows of several requests would come back as one; the backend runs them one by one anyway"
    if [tensor.name for tensor in config.output] != [HPS_OUTPUT]:
        yield f"Its output is not called {HPS_OUTPUT}, as the ensemble around it expects"


def find_instance_faults(config: pb.ModelConfig, params: ModelParams) -> Iterator[str]:
    """Yield instances that contradict the model's entry in ps.json."""
    if not config.instance_group:
        yield "There is no instance_group; the backend requires one"
    for group in config.instance_group:
        if params.gpucache and (group.kind != pb.ModelInstanceGroup.KIND_GPU or not group.gpus):
            yield "An instance_group is not KIND_GPU with gpus, although ps.json has gpucache"
        if foreign := sorted(set(group.gpus) - set(params.deployed_device_list)):
            yield f"It runs on the GPUs {foreign}, which deployed_device_list of {PS_FILE} lacks"
        elif group.gpus and params.deployed_device_list[-1] not in group.gpus:
            last, gpus = params.deployed_device_list[-1], list(group.gpus)
            yield f"deployed_device_list of {PS_FILE} ends with GPU {last}, where all instances would run; config has {gpus}"
        if len(set(group.gpus)) > 1:
            yield f"It runs on the GPUs {list(group.gpus)}: all instances would use the last one"
        if (group.count or 1) > params.num_of_worker_buffer_in_pool:
            yield f"{group.count} instances share {params.num_of_worker_buffer_in_pool} worker buffers, so some would wait"


def find_refresh_faults(config: pb.ModelConfig, params: ModelParams) -> Iterator[str]:
    """Yield faults of the refresh settings.

    The interval is read from config.pbtxt, in whole seconds. The backend ignores parameters outside of KNOWN_PARAMETERS.
    """
    if unread := sorted({*config.parameters} - KNOWN_PARAMETERS):
        yield f"The parameters {', '.join(unread)} are not read by the backend; it knows {', '.join(sorted(KNOWN_PARAMETERS))}"
    period = read_refresh_interval(config)
    if not period.isdecimal():
        yield f"refresh_interval is {period!r}: the backend reads whole seconds only, and refreshes without pause below one"
    if params.refresh_interval:
        yield f"refresh_interval of {PS_FILE} is {params.refresh_interval}; the backend goes by that of config.pbtxt, {period}"
    if period.isdecimal() and int(period) and not params.cache_refresh_percentage_per_iteration > 0:
        yield f"refresh_interval is {period}, and cache_refresh_percentage_per_iteration of {PS_FILE} is 0: no refresh happens"


def find_refresh_buffer_faults(config: pb.ModelConfig, params: ModelParams, repository: Path, mount: str) -> Iterator[str]:
    """Yield a fault where a refresh would write beyond its buffers. The sparse folders must exist."""
    share = params.cache_refresh_percentage_per_iteration
    if read_refresh_interval(config) == "0" or not share > 0:
        return
    key_files = [map_to_host(repository, mount, path) / "key" for path in params.sparse_files]
    sets = max(count_hps_sets(path.stat().st_size // KEY_BYTES, params.gpucacheper) for path in key_files)
    if not refreshes_whole_sets(sets, share):
        yield (
            f"cache_refresh_percentage_per_iteration of {PS_FILE} is {share} of {sets} sets of 64 rows: a refresh would write "
            f"beyond its buffers, which are not rounded up; expected whole sets, for example {fit_refresh_share(sets, share)}"
        )


def read_refresh_interval(config: pb.ModelConfig) -> str:
    """Return refresh_interval as config.pbtxt states it, or "0", the backend's default."""
    # Only membership may be asked first: an index adds an empty entry to a protobuf map.
    return config.parameters["refresh_interval"].string_value if "refresh_interval" in config.parameters else "0"


def find_table_faults(params: ModelParams, repository: Path, mount: str) -> Iterator[str]:
    """Yield faults of the sparse folder's rows.

    Raises ArtifactError when it is missing, truncated or has duplicate or reserved keys.
    """
    for path, width in zip(params.sparse_files, params.embedding_vecsize_per_table, strict=True):
        table = read_sparse_folder(map_to_host(repository, mount, path), width)
        if (row := find_non_finite(table.vectors)) is not None:
            yield f"Row {row} of {path}, key {table.keys[row]}, is not finite; expected numbers. Its answers would be NaN"
    if any(row_format != "fp32" for row_format in params.row_format_per_table):
        yield f"row_format_per_table is {list(params.row_format_per_table)}; HPS serves fp32 in any case"


def find_non_finite(vectors: np.ndarray) -> int | None:
    """Return the first row with a NaN or an infinity, None without any. vectors: float32 [N, D]."""
    for start in range(0, len(vectors), CHUNK_ROWS):
        is_finite = np.isfinite(vectors[start : start + CHUNK_ROWS]).all(axis=1)
        if not is_finite.all():
            return start + int(np.argmin(is_finite))
    return None


def find_order_fault(params: ModelParams, repository: Path, mount: str, features: Path, settings: PartSettings) -> str:
    """Return the fault where a hotter key follows a colder one, by the statistics published with `rank_features`; else ""."""
    table = read_sparse_folder(map_to_host(repository, mount, params.sparse_files[0]), params.embedding_vecsize_per_table[0])
    names = sorted(settings.first_keys, key=settings.first_keys.__getitem__)
    ends = [*(settings.first_keys[name] for name in names[1:]), len(table.keys)]
    rows = {name: range(end - settings.first_keys[name]) for name, end in zip(names, ends, strict=True)}
    uses = read_uses(features, rows, tuple(settings.stage["item_tables"]))
    in_order = np.concatenate([uses[name] for name in names])[table.keys]
    hotter = np.flatnonzero(in_order[1:] > in_order[:-1] * (1 + ROUNDING))
    if not len(hotter):
        return ""
    position = int(hotter[0]) + 1
    return (
        f"Key {table.keys[position]}, used more often than key {table.keys[position - 1]}, comes after it in the sparse folder "
        f"({len(hotter):,} such places): the GPU cache is filled from the start of the file, expected hottest first"
    )


def find_wiring_faults(rank: pb.ModelConfig, configs: Mapping[str, pb.ModelConfig]) -> Iterator[str]:
    """Yield faults of `rank`, the ensemble around the `hps` model.

    Both tensors must come from one step, in host memory, and one request at a time.
    """
    steps = {step.model_name: step for step in rank.ensemble_scheduling.step}
    if RANK_EMBEDDINGS not in steps:
        yield f"The ensemble {rank.name} has no step {RANK_EMBEDDINGS}; it has {', '.join(steps)}"
        return
    made_by = {target: (name, output) for name, step in steps.items() for output, target in step.output_map.items()}
    lookup = steps[RANK_EMBEDDINGS]
    for tensor in TENSORS:
        edge = lookup.input_map.get(tensor, "")
        source, output = made_by.get(edge, ("", ""))
        if output != tensor:
            yield f"{tensor} of {RANK_EMBEDDINGS} is fed by {edge or 'nothing'}; expected the output {tensor} of a step"
        elif any(group.kind != pb.ModelInstanceGroup.KIND_CPU for group in configs[source].instance_group):
            yield f"{source} makes {tensor} and is not KIND_CPU; the backend would read it from host memory, where it is not"
    for name in (rank.name, RANK_EMBEDDINGS):
        if configs[name].max_batch_size:
            yield f"{name} has max_batch_size {configs[name].max_batch_size}; behind hps nothing is batched, expected 0"


def find_key_faults(params: ModelParams, repository: Path, mount: str, features: Path, settings: PartSettings) -> Iterator[str]:
    """Yield a fault unless every key that `rank_features` may send has a row. Its tables follow each other without a gap."""
    if len(params.sparse_files) != 1:
        yield f"{PS_FILE} names {len(params.sparse_files)} tables; {features.parent.name} sends the keys of one"
        return
    table = read_sparse_folder(map_to_host(repository, mount, params.sparse_files[0]), params.embedding_vecsize_per_table[0])
    if not np.array_equal(np.sort(table.keys), np.arange(len(table.keys))):
        yield f"The keys of the table are not 0 to {len(table.keys) - 1}, as {features.parent.name} counts them"
    rows, item_tables = open_array(features, "item_rows"), settings.stage["item_tables"]
    largest = max(settings.first_keys[name] + int(rows[:, slot].max()) for slot, name in enumerate(item_tables))
    if largest >= len(table.keys):
        yield f"{features.parent.name} sends keys up to {largest}; the table has {len(table.keys)}"


def find_batch_faults(params: ModelParams, keys_per_request: int, max_batch_size: int) -> Iterator[str]:
    """Yield a fault unless ps.json states the number of keys that a request sends as one sample."""
    per_sample = sum(params.maxnum_catfeature_query_per_table_per_sample)
    if per_sample != keys_per_request:
        yield f"{PS_FILE} counts {per_sample} keys per sample, a request sends {keys_per_request}"
    if params.max_batch_size < max_batch_size:
        yield f"max_batch_size of {PS_FILE} is {params.max_batch_size}; callers may send {max_batch_size} requests at once"


def find_model(config: PsConfig, name: str) -> ModelParams | None:
    """Return a model's entry in ps.json, None without one."""
    return next((params for params in config.models if params.model == name), None)
