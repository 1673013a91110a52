"""Write `config.pbtxt` from the specs of `serving/contract/tensors.py`, and read it back by the official protobuf.

Triton's schema: `model_config.proto` of the 2.51 client (`tritonclient.grpc.model_config_pb2`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
from tritonclient.grpc import model_config_pb2 as pb

from serving.contract.errors import ExportError
from serving.contract.tensors import (
    ENSEMBLE,
    LIVE_MODELS,
    RECORD,
    STAGES,
    ModelSpec,
    RecordSpec,
    TensorSpec,
    make_ensemble_spec,
)

CONFIG_FILE = "config.pbtxt"
LAYOUTS = ("ensemble", "fused")  # one model per stage behind an ensemble, or one model that runs the four stages
WARMUP_ROWS = 4  # recorded requests in the warm-up files
WARMUP_BATCH = 8
LAST_RESORT = 1_000  # rate limiter priority of further instances: they get 1/1000 of the executions of the first
TRITON_TYPE = {
    "INT64": pb.TYPE_INT64,
    "INT32": pb.TYPE_INT32,
    "FP32": pb.TYPE_FP32,
    "FP64": pb.TYPE_FP64,
    "UINT8": pb.TYPE_UINT8,
    "BYTES": pb.TYPE_STRING,
}
DTYPE = {value: key for key, value in TRITON_TYPE.items()}


def list_models(layout: str) -> tuple[str, ...]:
    """Return the models of a repository in the order of publication: the one that callers use comes last."""
    return (*STAGES, *LIVE_MODELS, ENSEMBLE) if layout == "ensemble" else (*LIVE_MODELS, ENSEMBLE)


def read_layout(config: pb.ModelConfig) -> str:
    """Return the layout of a repository from the config of `recommend`."""
    return "ensemble" if config.platform == "ensemble" else "fused"


@dataclass(frozen=True)
class Serving:
    """Serving settings of one Triton model. Times in microseconds, 0 = off.

    A stage has no preferred batch sizes by default, because a stage is most efficient if a batch takes all that has queued. The
    fused layout prefers 16, so that each of its two processes leaves requests to the other.

    There is no queue delay by default: the requests that arrive during a batch form the next batch, so a delay only adds
    latency.

    Priorities and queue limits are off by default: on tritonserver 2.51 each of them can delay a request by up to 500 ms when
    it arrives while the only instance is busy and no other follows (docs/serving.md). Tell the server callers' deadlines
    instead (docs/calling.md): a stage refuses what cannot be answered in time.
    """

    instances: int = 1  # processes of the model, at most 256, or instances of a TensorRT network on its GPU
    max_batch_size: int = 64  # most requests in a batch
    preferred_batch_sizes: tuple[int, ...] = ()  # sizes to aim at; none: all that is queued, [16] if fused
    queue_delay_us: int = 0  # how long a batch waits for more requests
    priority_levels: int = 0  # number of levels; 1 is served first
    default_priority: int = 1  # priority of requests that state none
    queue_timeout_us: int = 0  # a request that waited longer is refused (UNAVAILABLE)
    queue_length: int = 0  # requests beyond it are refused at once
    response_cache: bool = False  # let Triton cache answers, without expiry: only where no events come and no rows are updated


def make_stage_config(spec: ModelSpec, serving: Serving, versions: list[int], warmup_rows: int) -> pb.ModelConfig:
    """Return the config of a Python-backend model: a stage, or `recommend` of the fused layout.

    versions: those to load; warmup_rows: recorded rows in its warm-up files, 0 for no warm-up
    """
    config = pb.ModelConfig(name=spec.name, backend="python", max_batch_size=serving.max_batch_size)
    _add_tensors(config, spec)
    config.version_policy.specific.versions.extend(versions)
    set_instances(config, serving.instances)
    _add_batching(config.dynamic_batching, serving)
    config.response_cache.enable = serving.response_cache
    config.parameters["FORCE_CPU_ONLY_INPUT_TENSORS"].string_value = "yes"
    if warmup_rows:
        add_warmup(config, spec, warmup_rows)
    return config


def set_instances(config: pb.ModelConfig, count: int) -> None:
    """Set the number of processes. The first one is preferred; the others are used only while it is busy.

    In this way the requests of one client go to a process with warm caches. It needs a server that was started with
    `--rate-limit=execution_count`, as server/launcher.py starts it.
    """
    del config.instance_group[:]
    first = config.instance_group.add(kind=pb.ModelInstanceGroup.KIND_CPU, count=1)
    if count > 1:
        others = config.instance_group.add(kind=pb.ModelInstanceGroup.KIND_CPU, count=count - 1)
        first.rate_limiter.priority, others.rate_limiter.priority = 1, LAST_RESORT


def make_ensemble_config(stages: dict[str, ModelSpec], generation: int, serving: Serving) -> pb.ModelConfig:
    """Return the config of the ensemble `recommend`, with every step pinned to `generation`, so that no answer mixes two."""
    spec = make_ensemble_spec(stages)
    config = pb.ModelConfig(name=spec.name, platform="ensemble", max_batch_size=serving.max_batch_size)
    _add_tensors(config, spec)
    config.version_policy.specific.versions.append(generation)
    config.response_cache.enable = serving.response_cache
    for name in STAGES:
        step = config.ensemble_scheduling.step.add(model_name=name, model_version=generation)
        for tensor in stages[name].inputs:
            step.input_map[tensor.name] = tensor.name
        for tensor in stages[name].outputs:
            step.output_map[tensor.name] = tensor.name
    return config


def _add_tensors(config: pb.ModelConfig, spec: ModelSpec) -> None:
    for tensor in spec.inputs:
        config.input.add(name=tensor.name, data_type=TRITON_TYPE[tensor.dtype], dims=tensor.dims, optional=tensor.optional)
    for tensor in spec.outputs:
        config.output.add(name=tensor.name, data_type=TRITON_TYPE[tensor.dtype], dims=tensor.dims)
    write_record_fields(config, spec)


def write_record_fields(config: pb.ModelConfig, spec: ModelSpec) -> None:
    """Write the fields of every record as a parameter, because a config has no other place for them."""
    for record in spec.records:
        config.parameters[record.parameter].string_value = record.stated_fields


def read_record_fields(config: pb.ModelConfig, tensor: str) -> str:
    """Return the fields of a tensor that is a record, as its config states them; "" for other tensors."""
    parameter = f"{RECORD}{tensor}"
    return config.parameters[parameter].string_value if parameter in config.parameters else ""


def _add_batching(batching: pb.ModelDynamicBatching, serving: Serving) -> None:
    batching.preferred_batch_size.extend(size for size in serving.preferred_batch_sizes if size <= serving.max_batch_size)
    batching.max_queue_delay_microseconds = serving.queue_delay_us
    if serving.priority_levels:
        batching.priority_levels = serving.priority_levels
        batching.default_priority_level = serving.default_priority
    if serving.queue_timeout_us or serving.queue_length:
        policy = batching.default_queue_policy
        policy.timeout_action = pb.ModelQueuePolicy.REJECT
        policy.default_timeout_microseconds = serving.queue_timeout_us
        policy.allow_timeout_override = True
        policy.max_queue_size = serving.queue_length


def add_warmup(config: pb.ModelConfig, spec: ModelSpec, rows: int) -> None:
    """Add recorded requests to a config as its warm-up: each of `rows` alone, and the first one as a batch.

    Triton reads one row per file, and repeats it for a batch.
    """
    for row, batch in [(row, 1) for row in range(rows)] + [(0, min(WARMUP_BATCH, config.max_batch_size))]:
        warmup = config.model_warmup.add(name=f"recorded_{row}_batch_{batch}", batch_size=batch)
        for tensor in spec.inputs:
            entry = warmup.inputs[tensor.name]
            entry.data_type = TRITON_TYPE[tensor.dtype]
            entry.dims.extend(tensor.dims)
            entry.input_data_file = name_warmup_file(tensor.name, row)


def name_warmup_file(tensor: str, row: int) -> str:
    """Return the name of the warm-up file of a tensor and a recorded row."""
    return f"{tensor}_{row}"


def encode_warmup(array: np.ndarray) -> bytes:
    """Return a tensor in the format of warm-up files: raw little-endian values, strings with a 4-byte length each."""
    if array.dtype != np.object_:
        return np.ascontiguousarray(array).tobytes()
    return b"".join(len(text).to_bytes(4, "little") + text for text in array.ravel())


def holds_row(stored: bytes, array: np.ndarray) -> bool:
    """Return whether a warm-up file has the length that an array needs, whatever its values."""
    if array.dtype != np.object_:
        return len(stored) == array.nbytes
    end = 0
    for _ in range(array.size):
        end += 4 + int.from_bytes(stored[end : end + 4], "little")
    return end == len(stored)


def check_edges(stages: dict[str, ModelSpec]) -> None:
    """Raise ExportError unless each tensor is the same on both ends of its edge and every output is used."""
    produced: dict[str, TensorSpec] = {}
    for name in STAGES:
        for tensor in stages[name].inputs:
            source = produced.get(tensor.name, tensor)
            if source.text != tensor.text:
                raise ExportError(
                    f"A tensor leaves its stage as {source.text} and {name} expects {tensor.text}. "
                    "Make both agree in serving/contract/tensors.py."
                )
        produced.update({tensor.name: tensor for tensor in stages[name].outputs})
    used_names = {t.name for spec in stages.values() for t in spec.inputs} | {t.name for t in stages[STAGES[-1]].outputs}
    if unused := sorted(produced.keys() - used_names):
        raise ExportError(f"No stage uses {', '.join(unused)}; Triton refuses such an ensemble. Remove them from the contract.")


def read_spec(config: pb.ModelConfig) -> ModelSpec:
    """Return the spec that a config states: names, types, dims and fields of records, without fill values.

    Raises ExportError for a type that no tensor of this project has.
    """
    for tensor in (*config.input, *config.output):
        if tensor.data_type not in DTYPE:
            raise ExportError(
                f"{config.name}/{CONFIG_FILE}: {tensor.name} has the type {pb.DataType.Name(tensor.data_type)}; "
                f"expected one of {', '.join(map(pb.DataType.Name, DTYPE))}. Export the repository again."
            )
    inputs = tuple(read_tensor(config, TensorSpec(t.name, DTYPE[t.data_type], tuple(t.dims), t.optional)) for t in config.input)
    outputs = tuple(read_tensor(config, TensorSpec(t.name, DTYPE[t.data_type], tuple(t.dims))) for t in config.output)
    return ModelSpec(config.name, inputs, outputs)


def compare_tensors(config: pb.ModelConfig, spec: ModelSpec) -> str:
    """Return "" when a config states the tensors of `spec`, otherwise the tensors that only one of them has."""
    config_tensors, spec_tensors = ({t.text for t in (*side.inputs, *side.outputs)} for side in (read_spec(config), spec))
    return ", ".join(sorted(config_tensors ^ spec_tensors))


def read_tensor(config: pb.ModelConfig, tensor: TensorSpec) -> TensorSpec:
    """Return the tensor as a record when the config states its fields, otherwise the tensor itself."""
    fields_text = read_record_fields(config, tensor.name)
    if not fields_text:
        return tensor
    fields = re.findall(r"(\S+) (\S+) \[([\d, ]*)\]", fields_text)
    specs = (TensorSpec(name, dtype, tuple(int(n) for n in dims.split(",") if n)) for name, dtype, dims in fields)
    return RecordSpec(**vars(tensor), fields=tuple(specs))
