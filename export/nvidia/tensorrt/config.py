"""config.pbtxt of a TensorRT model, and of its two stand-ins that serve the same tensors from the ONNX file.

CUDA graphs: one per tuned batch size and one for the largest, captured at load. A graph also serves sizes down to just above
the next smaller one. Its unused rows hold stale values, on which no other row depends. A model without a batch axis gets none:
the backend would record them under batch size 0, look for batch size 1, and never launch one (SetCudaGraphShape).
"""

from __future__ import annotations

from collections.abc import Sequence

from tritonclient.grpc import model_config_pb2 as pb

from export.nvidia.tensorrt.build_engines import ONNX, PLAN
from export.nvidia.tensorrt.profiles import Profile, find_largest_batch
from repository.triton.config import TRITON_TYPE
from serving.contract.errors import ConfigError
from serving.contract.tensors import TensorSpec

PYTHON_MODEL = "model.py"


def make_tensorrt_config(
    name: str,
    inputs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec],
    max_batch_size: int,
    profiles: Sequence[Profile],
    versions: Sequence[int],
    preferred_batch_sizes: Sequence[int] = (),
    queue_delay_us: int = 0,
    instances: int = 1,
    gpus: Sequence[int] = (0,),
    cuda_graphs: bool = True,
) -> pb.ModelConfig:
    """Return a tensorrt_plan config with `instances` per GPU, each with one execution context per profile.

    Raises ConfigError where tritonserver would refuse the model: too large a batch, a type that TensorRT lacks, no GPU.
    """
    config = _make_shared_config(name, inputs, outputs, max_batch_size, versions)
    if max_batch_size:
        config.dynamic_batching.preferred_batch_size.extend(preferred_batch_sizes)
        config.dynamic_batching.max_queue_delay_microseconds = queue_delay_us
    config.platform, config.backend, config.default_model_filename = "tensorrt_plan", "tensorrt", PLAN
    if not gpus:
        raise ConfigError(f"{name} has no GPU: TensorRT serves from GPUs only. Name at least one, by its number.")
    if max_batch_size > find_largest_batch(profiles):
        raise ConfigError(
            f"{name} is to be served in batches of {max_batch_size}, and no profile accepts more than "
            f"{find_largest_batch(profiles)} rows. Make the profiles with the same max_batch_size."
        )
    group = config.instance_group.add(kind=pb.ModelInstanceGroup.KIND_GPU, count=instances, gpus=gpus)
    group.profile.extend(str(index) for index in range(len(profiles)))
    if cuda_graphs and max_batch_size:
        _add_graphs(config, profiles)
    _add_warmup(config, profiles)
    return config


def make_onnxruntime_config(tensorrt: pb.ModelConfig) -> pb.ModelConfig:
    """Return the same model on Triton's ONNX Runtime backend, which current Triton images have.

    On all GPUs that are there, or on the CPU: tritonserver refuses a model that names a GPU which it does not have.
    """
    config = _drop_tensorrt_settings(tensorrt)
    config.backend, config.default_model_filename = "onnxruntime", ONNX
    for group in config.instance_group:
        group.kind = pb.ModelInstanceGroup.KIND_AUTO
        del group.gpus[:]
    return config


def make_python_config(tensorrt: pb.ModelConfig) -> pb.ModelConfig:
    """Return the same model with ONNX Runtime inside the Python backend: merlin-hugectr images have no ONNX Runtime backend."""
    config = _drop_tensorrt_settings(tensorrt)
    config.backend, config.default_model_filename = "python", PYTHON_MODEL
    del config.instance_group[:]
    config.instance_group.add(kind=pb.ModelInstanceGroup.KIND_CPU, count=1)
    config.parameters["FORCE_CPU_ONLY_INPUT_TENSORS"].string_value = "yes"
    return config


def _make_shared_config(
    name: str, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec], max_batch_size: int, versions: Sequence[int]
) -> pb.ModelConfig:
    """Return the config that all backends share: tensors, the largest batch, versions."""
    if strings := [tensor.name for tensor in (*inputs, *outputs) if tensor.dtype == "BYTES"]:
        raise ConfigError(f"{name} has the string tensors {strings}; TensorRT has none. Encode them in the preprocess stage.")
    config = pb.ModelConfig(name=name, max_batch_size=max_batch_size)
    for tensor in inputs:
        config.input.add(name=tensor.name, data_type=TRITON_TYPE[tensor.dtype], dims=tensor.dims)
    for tensor in outputs:
        config.output.add(name=tensor.name, data_type=TRITON_TYPE[tensor.dtype], dims=tensor.dims)
    config.version_policy.specific.versions.extend(versions)
    return config


def _add_warmup(config: pb.ModelConfig, profiles: Sequence[Profile]) -> None:
    """Add warm-up batches of one row and of the most rows. Zeros suffice to load code and allocate memory."""
    batched = config.max_batch_size > 0
    for label, profile in (("one_row", profiles[0]), ("most_rows", profiles[-1])):
        shapes = {name: span.minimum if label == "one_row" else span.maximum for name, span in profile.items()}
        rows = next(iter(shapes.values()))[0]
        warmup = config.model_warmup.add(name=label, batch_size=rows if batched else 1)
        for tensor in config.input:
            entry = warmup.inputs[tensor.name]
            entry.data_type, entry.zero_data = tensor.data_type, True
            entry.dims.extend(shapes[tensor.name][1:] if batched else shapes[tensor.name])


def _add_graphs(config: pb.ModelConfig, profiles: Sequence[Profile]) -> None:
    """Add one graph per tuned shape and one for the largest. Each starts just above the previous one."""
    config.optimization.cuda.graphs = True
    tuned = [{name: span.optimum for name, span in profile.items()} for profile in profiles]
    largest = {name: span.maximum for name, span in profiles[-1].items()}
    sizes = tuned if largest in tuned else [*tuned, largest]
    for position, shapes in enumerate(sizes):
        below = sizes[position - 1] if position else None
        _add_graph(config, shapes, below)


def _add_graph(config: pb.ModelConfig, shapes: dict[str, tuple[int, ...]], below: dict[str, tuple[int, ...]] | None) -> None:
    """Add a graph for `shapes`, used from just above `below` on."""
    graph = config.optimization.cuda.graph_spec.add()
    graph.batch_size = next(iter(shapes.values()))[0]
    graph.graph_lower_bound.batch_size = next(iter(below.values()))[0] + 1 if below else graph.batch_size
    for name, shape in shapes.items():
        graph.input[name].dim.extend(shape[1:])
        graph.graph_lower_bound.input[name].dim.extend(shape[1:])


def _drop_tensorrt_settings(tensorrt: pb.ModelConfig) -> pb.ModelConfig:
    """Return a copy without the settings that only TensorRT understands."""
    config = pb.ModelConfig()
    config.CopyFrom(tensorrt)
    config.platform = ""
    config.ClearField("optimization")
    for group in config.instance_group:
        del group.profile[:]
    return config
