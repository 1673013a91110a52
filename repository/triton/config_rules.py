"""Find what tritonserver would refuse in a config.pbtxt of any backend: edges, warm-up, model file, version."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

from tritonclient.grpc import model_config_pb2 as pb

from repository.triton.config import read_record_fields

MODEL_FILES = {"python": "model.py", "onnxruntime": "model.onnx", "tensorrt": "model.plan"}  # Triton's defaults by backend
BUILT_LATER = frozenset({"model.plan"})  # the start script builds it on the serving machine


def find_version_faults(config: pb.ModelConfig, generation: int) -> Iterator[str]:
    """Yield a fault unless Triton loads the version that the ensembles are pinned to."""
    if (versions := list(config.version_policy.specific.versions)) != [generation]:
        yield f"Its version_policy names {versions or 'no version'}; the ensembles are pinned to {generation}"


def find_model_file_faults(config: pb.ModelConfig, version: Path) -> Iterator[str]:
    """Yield a fault if Triton would not find the model file. version: the version folder

    A missing TensorRT engine is no fault, because it is built on the serving machine.
    """
    expected = MODEL_FILES.get(config.backend)
    if expected is None:
        return
    file_name = config.default_model_filename or expected
    if file_name != expected:
        yield f"default_model_filename is {file_name!r}; for {config.backend} the export writes {expected}"
    elif file_name not in BUILT_LATER and not (version / file_name).is_file():
        yield f"{version.name}/{file_name} is missing; the backend {config.backend} opens it"


def find_warmup_faults(config: pb.ModelConfig, folder: Path) -> Iterator[str]:
    """Yield the faults of warm-ups that do not match the model's inputs; such a model does not load. folder: `warmup/`"""
    inputs = {tensor.name: tensor for tensor in config.input}
    for warmup in config.model_warmup:
        if missing := sorted({name for name, tensor in inputs.items() if not tensor.optional} - {*warmup.inputs}):
            yield f"Warm-up {warmup.name} lacks {', '.join(missing)}, a required input"
        if warmup.batch_size > max(config.max_batch_size, 1):
            yield f"Warm-up {warmup.name} has a batch of {warmup.batch_size}; max_batch_size is {config.max_batch_size}"
        for name, entry in sorted(warmup.inputs.items()):
            yield from _find_tensor_faults(warmup.name, name, entry, inputs.get(name))
            if entry.input_data_file:
                yield from _find_file_faults(entry, folder / entry.input_data_file)


def _find_tensor_faults(warmup: str, name: str, entry: pb.ModelWarmup.Input, tensor: pb.ModelInput | None) -> Iterator[str]:
    """Yield the faults of one warm-up tensor. Its dims, like those of the model's input, exclude the batch axis."""
    if tensor is None:
        yield f"Warm-up {warmup} sends {name}, which the model does not take"
        return
    if entry.data_type != tensor.data_type:
        sent_type, expected_type = (pb.DataType.Name(kind) for kind in (entry.data_type, tensor.data_type))
        yield f"Warm-up {warmup} sends {name} as {sent_type}, the model takes {expected_type}"
    fits = len(entry.dims) == len(tensor.dims) and all(b in (-1, a) for a, b in zip(entry.dims, tensor.dims, strict=True))
    if not fits or any(size < 1 for size in entry.dims):
        yield f"Warm-up {warmup} sends {name} with the dims {list(entry.dims)}, the model takes {list(tensor.dims)}"


def _find_file_faults(entry: pb.ModelWarmup.Input, path: Path) -> Iterator[str]:
    """Yield a fault where the file of a warm-up tensor is missing or too short for one row."""
    file_name = f"warmup/{entry.input_data_file}"
    if not path.is_file():
        yield f"{file_name}: The file is missing"
    elif path.stat().st_size < (least := count_row_bytes(entry)):
        yield f"{file_name} holds {path.stat().st_size} bytes; one row of its tensor takes at least {least}"


def count_row_bytes(entry: pb.ModelWarmup.Input) -> int:
    """Return the least bytes of one row of a warm-up tensor. A string has at least the 4 bytes of its length."""
    width = {pb.TYPE_STRING: 4, pb.TYPE_FP32: 4, pb.TYPE_INT32: 4, pb.TYPE_UINT8: 1}.get(entry.data_type, 8)
    return width * math.prod(entry.dims)


def find_ensemble_faults(config: pb.ModelConfig, configs: dict[str, pb.ModelConfig], generation: int) -> Iterator[str]:
    """Yield the faults of one ensemble; none for a plain model."""
    if config.platform != "ensemble":
        return
    known = {tensor.name: describe_tensor(config, tensor) for tensor in config.input}
    if both := sorted(known.keys() & {tensor.name for tensor in config.output}):
        yield f"{', '.join(both)} is an input and an output of the same name: callers would get back what they sent"
    for step in config.ensemble_scheduling.step:
        if (model := configs.get(step.model_name)) is None:
            yield f"Step {step.model_name} is no model of this repository; expected one of {', '.join(sorted(configs))}"
            continue
        if step.model_version != generation:
            yield f"Step {step.model_name} is pinned to {step.model_version}, expected {generation}"
        if config.max_batch_size > model.max_batch_size:
            yield f"It allows batches of {config.max_batch_size}, but its step {model.name} only of {model.max_batch_size}"
        inputs, outputs = (
            {tensor.name: describe_tensor(model, tensor) for tensor in side} for side in (model.input, model.output)
        )
        for tensor, source in step.input_map.items():
            if not can_connect(known.get(source), inputs.get(tensor)):
                source_text, input_text = (describe_end(side) for side in (known.get(source), inputs.get(tensor)))
                yield f"Edge {source} -> {model.name}.{tensor}: the source is {source_text}, the input is {input_text}"
        known |= {target: outputs.get(tensor) for tensor, target in step.output_map.items()}


def describe_tensor(config: pb.ModelConfig, tensor: pb.ModelInput | pb.ModelOutput) -> tuple[int, tuple[int, ...], str]:
    """Return the type, the dims with the batch axis, and the fields of a record ("" for other tensors)."""
    return tensor.data_type, add_batch_axis(config, tensor), read_record_fields(config, tensor.name)


def describe_end(end: tuple[int, tuple[int, ...], str] | None) -> str:
    """Return one end of an edge in words. end: from `describe_tensor`; None if there is no such tensor"""
    if end is None:
        return "missing"
    dtype, dims, fields = end
    return f"{pb.DataType.Name(dtype)} {list(dims)}" + (f" ({fields})" if fields else "")


def add_batch_axis(config: pb.ModelConfig, tensor: pb.ModelInput | pb.ModelOutput) -> tuple[int, ...]:
    """Return the dims with the batch axis, which Triton adds where max_batch_size is above 0."""
    return (*((-1,) if config.max_batch_size else ()), *tensor.dims)


def can_connect(one: tuple | None, other: tuple | None) -> bool:
    """Return whether two ends of an edge have the same type, fields and dims. A dim of -1 matches any number.

    one, other: from `describe_tensor`; None: there is no such tensor, so nothing connects to it
    """
    if one is None or other is None or (one[0], one[2]) != (other[0], other[2]):
        return False
    return len(one[1]) == len(other[1]) and all(a == b or -1 in (a, b) for a, b in zip(one[1], other[1], strict=True))
