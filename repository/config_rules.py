"""Check what every config.pbtxt of a merlin repository needs, whatever its backend: warm-up, model file, version."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tritonclient.grpc import model_config_pb2 as pb

from repository.check import count_row_bytes

MODEL_FILES = {"python": "model.py", "onnxruntime": "model.onnx", "tensorrt": "model.plan"}  # used where the config names none
BUILT_LATER = frozenset({"model.plan"})  # by the start script, on the machine that serves it


def find_version_faults(config: pb.ModelConfig, generation: int) -> Iterator[str]:
    """Yield a fault unless Triton loads the version that the ensembles are pinned to."""
    if (versions := list(config.version_policy.specific.versions)) != [generation]:
        yield f"Its version_policy names {versions or 'no version'}; the ensembles are pinned to {generation}"


def find_model_file_faults(config: pb.ModelConfig, version: Path) -> Iterator[str]:
    """Yield a fault where Triton would not find the model file. version: the version folder.

    A missing engine is no fault: it is built on the serving machine.
    """
    expected = MODEL_FILES.get(config.backend)
    if expected is None:
        return
    file_name = config.default_model_filename or expected
    if file_name != expected:
        yield f"default_model_filename is {file_name!r}; for {config.backend} the export writes {expected}"
    elif file_name not in BUILT_LATER and not (version / file_name).is_file():
        yield f"{version.name}/{file_name} is missing, which {config.backend} opens"


def find_warmup_faults(config: pb.ModelConfig, folder: Path) -> Iterator[str]:
    """Yield the faults of a warm-up that does not match the model's inputs; such a model does not load. folder: `warmup/`."""
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


def _find_tensor_faults(warmup: str, name: str, entry: pb.ModelWarmup.Input, stated: pb.ModelInput | None) -> Iterator[str]:
    """Yield the faults of one warm-up tensor. Its dims, like those of the model's input, exclude the batch axis."""
    if stated is None:
        yield f"Warm-up {warmup} sends {name}, which the model does not take"
        return
    if entry.data_type != stated.data_type:
        sent, expected = (pb.DataType.Name(kind) for kind in (entry.data_type, stated.data_type))
        yield f"Warm-up {warmup} sends {name} as {sent}, the model takes {expected}"
    fits = len(entry.dims) == len(stated.dims) and all(b in (-1, a) for a, b in zip(entry.dims, stated.dims, strict=True))
    if not fits or any(size < 1 for size in entry.dims):
        yield f"Warm-up {warmup} sends {name} with the dims {list(entry.dims)}, the model takes {list(stated.dims)}"


def _find_file_faults(entry: pb.ModelWarmup.Input, path: Path) -> Iterator[str]:
    """Yield a fault where the file of a warm-up tensor is missing or too short for one row."""
    where = f"warmup/{entry.input_data_file}"
    if not path.is_file():
        yield f"{where}: The file is missing"
    elif path.stat().st_size < (least := count_row_bytes(entry)):
        yield f"{where} holds {path.stat().st_size} bytes, a row of its tensor takes {least}"
