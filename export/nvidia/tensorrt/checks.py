"""Check an exported model by the TensorRT backend's rules, before its engine exists.

The engine is built on the target machine. The checks here use the network's tensors and the profiles of `engine.json`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import onnx
from google.protobuf.message import DecodeError
from onnx import TensorProto
from tritonclient.grpc import model_config_pb2 as pb

from export.nvidia.tensorrt import build_engines
from repository.checks.finding import Finding
from repository.triton.models import read_config
from serving.contract.errors import ArtifactError

AGAIN = "Export the repository again."
TYPES = {  # types of the backend (tensorrt_utils.cc) -> ONNX type of the engine's tensor
    pb.TYPE_FP32: TensorProto.FLOAT,
    pb.TYPE_FP16: TensorProto.FLOAT16,
    pb.TYPE_INT8: TensorProto.INT8,
    pb.TYPE_UINT8: TensorProto.UINT8,
    pb.TYPE_INT32: TensorProto.INT32,
    pb.TYPE_INT64: TensorProto.INT64,
    pb.TYPE_BOOL: TensorProto.BOOL,
    pb.TYPE_BF16: TensorProto.BFLOAT16,
}
# Operators that networks like ours use and that TensorRT 8.6 imports (onnx-tensorrt at release/8.6-GA, docs/operators.md)
LOOKED_UP = """
Abs Add Cast Clip Concat Constant ConstantOfShape DequantizeLinear Div Einsum Equal Erf Exp Expand Flatten Gather Gemm Identity
LayerNormalization Log MatMul Max Min Mod Mul Neg Pow QuantizeLinear Range ReduceMean ReduceSum Relu Reshape Shape Sigmoid Slice
Softmax Split Sqrt Squeeze Sub Sum Tanh Tile Transpose Unsqueeze Where
"""
OPERATORS = frozenset(LOOKED_UP.split())
MODEL_FILES = {  # the model file of each config
    build_engines.TENSORRT: build_engines.PLAN,
    build_engines.ONE_PROFILE: build_engines.PLAN,
    build_engines.ONNXRUNTIME: build_engines.ONNX,
    build_engines.PYTHON: "model.py",
}
NEWEST_OPSET = 17  # of TensorRT 8.6


def check_tensorrt_model(model: Path) -> Iterator[Finding]:
    """Yield what the backend would refuse, and what the start script could not do.

    model: <REPO>/<name>, exported for TensorRT.
    """
    where = f"{model.name}/{build_engines.CONFIG}"
    if missing := [name for name in MODEL_FILES if not (model / "configs" / f"{name}.pbtxt").is_file()]:
        fact = f"configs/ lacks {', '.join(missing)}: the start script could not fall back"
        yield Finding("error", model.name, fact, AGAIN)
        return
    configs = {name: read_config(model / "configs" / f"{name}.pbtxt") for name in MODEL_FILES}
    config, placed = configs[build_engines.TENSORRT], read_config(model / build_engines.CONFIG)
    for name, expected in MODEL_FILES.items():
        if (file_name := configs[name].default_model_filename) != expected:
            fact = f"default_model_filename is {file_name!r}, expected {expected!r}: Triton would open another file"
            yield Finding("error", f"{model.name}/configs/{name}.pbtxt", fact, AGAIN)
    for name in (build_engines.ONNXRUNTIME, build_engines.PYTHON):
        if any(group.kind == pb.ModelInstanceGroup.KIND_GPU or group.gpus for group in configs[name].instance_group):
            fact = "An instance_group asks for a GPU: tritonserver would refuse the stand-in where there is none"
            yield Finding("warning", f"{model.name}/configs/{name}.pbtxt", fact, AGAIN)
    if placed not in configs.values():
        fact = "It is none of those in configs/, one of which the start script puts in its place; only they are checked"
        yield Finding("error", where, fact, "Change those files instead, or export the repository again.")
    if placed.backend != "tensorrt":
        fact = "It is served by ONNX Runtime: the start script found no engine when it last ran"
        yield Finding("warning", where, fact, "Read the output of build_engines.py, correct the cause, and start again.")
    for version in config.version_policy.specific.versions:
        yield from check_version(config, model / str(version), where)
    for fact in (*find_placement_faults(config), *find_batching_faults(config)):
        yield Finding("error", where, fact, AGAIN)
    for fact in find_useless_settings(config):
        yield Finding("warning", where, fact, AGAIN)


def check_version(config: pb.ModelConfig, version: Path, where: str) -> Iterator[Finding]:
    """Compare the network and its profiles with the config that serves them."""
    if missing := [name for name in ("model.onnx", "engine.json", "model.py") if not (version / name).is_file()]:
        yield Finding("error", str(version), f"{', '.join(missing)} missing", AGAIN)
        return
    try:
        engine = json.loads((version / build_engines.ENGINE_FILE).read_text())
        profiles = engine["profiles"]
    except (ValueError, KeyError, TypeError) as error:
        raise ArtifactError(f"{version / build_engines.ENGINE_FILE} does not describe an engine ({error}). {AGAIN}") from error
    try:
        network = onnx.load(str(version / build_engines.ONNX))
    except DecodeError as error:
        raise ArtifactError(f"{version / build_engines.ONNX} is not an ONNX file ({error}). {AGAIN}") from error
    for fact in find_operator_faults(network):
        yield Finding(
            "warning", f"{version.parent.name}/{version.name}/{build_engines.ONNX}", fact, "ONNX Runtime serves it then."
        )
    for fact in (
        *find_tensor_faults(config, network.graph),
        *find_profile_faults(config, profiles),
        *find_graph_faults(config, profiles),
    ):
        yield Finding("error", where, fact, AGAIN)


def find_placement_faults(config: pb.ModelConfig) -> Iterator[str]:
    """Yield instances outside of GPUs: the backend supports only these."""
    if not config.instance_group:
        yield "There is no instance_group: the profiles would not be named"
    for group in config.instance_group:
        if group.kind != pb.ModelInstanceGroup.KIND_GPU or not group.gpus:
            yield "An instance_group is not KIND_GPU with gpus; the TensorRT backend has no other"


def find_batching_faults(config: pb.ModelConfig) -> Iterator[str]:
    """Yield batching without a batch axis, and preferred sizes above the largest batch."""
    if not config.max_batch_size and config.HasField("dynamic_batching"):
        yield "dynamic_batching with max_batch_size 0: there is no axis to batch on"
    if too_big := [size for size in config.dynamic_batching.preferred_batch_size if size > config.max_batch_size]:
        yield f"preferred_batch_size {too_big} above max_batch_size {config.max_batch_size}"


def find_useless_settings(config: pb.ModelConfig) -> Iterator[str]:
    """Yield what costs GPU memory and time at load and is never used, because the model has no batch axis.

    The backend counts every request of such a model as one row when it looks for a graph and for the closest profile.
    """
    if config.max_batch_size:
        return
    if config.optimization.cuda.graphs:
        yield "CUDA graphs with max_batch_size 0: the backend records them for batch size 0, looks for 1, and launches none"
    if idle := [index for group in config.instance_group for index in group.profile[1:]]:
        yield f"The profiles {idle} with max_batch_size 0: only the one tuned for the fewest rows runs"


def find_operator_faults(network: onnx.ModelProto) -> Iterator[str]:
    """Yield operators that the oldest TensorRT might not import. Its parser decides when the engine is built."""
    if unknown := sorted({node.op_type for node in network.graph.node} - OPERATORS):
        yield f"It uses {', '.join(unknown)}, which are not among the operators looked up for TensorRT 8.6"
    if (opset := max(entry.version for entry in network.opset_import)) > NEWEST_OPSET:
        yield f"Its opset is {opset}; TensorRT 8.6 reads up to {NEWEST_OPSET}"


def find_tensor_faults(config: pb.ModelConfig, graph: onnx.GraphProto) -> Iterator[str]:
    """Yield differences in names, types and axes. The engine has one more axis than the config where Triton adds the batch."""
    added = 1 if config.max_batch_size else 0
    for side, config_tensors, graph_tensors in (("input", config.input, graph.input), ("output", config.output, graph.output)):
        network = {value.name: value.type.tensor_type for value in graph_tensors}
        if {tensor.name for tensor in config_tensors} != network.keys():
            yield f"It names the {side}s {sorted(t.name for t in config_tensors)}, the network has {sorted(network)}"
            continue
        for tensor in config_tensors:
            shape = network[tensor.name].shape.dim
            if TYPES.get(tensor.data_type) != network[tensor.name].elem_type:
                yield f"{tensor.name} is {pb.DataType.Name(tensor.data_type)}, which the network does not take"
            if len(tensor.dims) + added != len(shape):
                yield f"{tensor.name} has {len(tensor.dims) + added} axes with the batch, the network {len(shape)}"
            elif added and shape[0].HasField("dim_value"):
                yield f"{tensor.name} has a fixed first axis, and Triton must be able to batch on it"


def find_profile_faults(config: pb.ModelConfig, profiles: list[dict]) -> Iterator[str]:
    """Yield named profiles that do not exist or do not fit the config's dims, and a largest batch that no profile accepts."""
    named_profiles = {index for group in config.instance_group for index in group.profile}
    if unknown := sorted(named_profiles - {str(index) for index in range(len(profiles))}):
        yield f"instance_group names the profiles {unknown}, engine.json has {len(profiles)}"
    largest = max((min(span[2][0] for span in profile.values()) for profile in profiles), default=0)
    if config.max_batch_size > largest:
        yield f"max_batch_size {config.max_batch_size}, and no profile accepts more than {largest} rows"
    for number, profile in enumerate(profiles):
        for tensor in config.input:
            dims = ([-1] if config.max_batch_size else []) + list(tensor.dims)
            smallest, _, most = profile.get(tensor.name, ([], [], []))
            if len(dims) != len(most):
                yield f"profile {number} gives {tensor.name} {len(most)} axes, expected {len(dims)}"
            elif any(size != -1 and not low <= size <= high for size, low, high in zip(dims, smallest, most, strict=True)):
                yield f"{tensor.name} with dims {list(tensor.dims)} lies outside profile {number}: {smallest} to {most}"


def find_graph_faults(config: pb.ModelConfig, profiles: list[dict]) -> Iterator[str]:
    """Yield CUDA graphs with a wrong batch size, bounds out of order, or shapes that no profile accepts.

    Their batch size is 0 exactly where the model has no batch axis.
    """
    for graph in config.optimization.cuda.graph_spec:
        size, least = graph.batch_size, graph.graph_lower_bound.batch_size
        if (size == 0) != (config.max_batch_size == 0) or size > config.max_batch_size:
            yield f"A CUDA graph of batch size {size} with max_batch_size {config.max_batch_size}"
        if graph.HasField("graph_lower_bound") and not 0 < least <= size:
            yield f"A CUDA graph of batch size {size} from {least} on"
        if {*graph.input} != {tensor.name for tensor in config.input}:
            yield f"A CUDA graph for the inputs {sorted(graph.input)}; it must name all of them"
        for name, shape in graph.input.items():
            dims = ([size] if config.max_batch_size else []) + list(shape.dim)
            if not any(fits_profile(dims, profile.get(name)) for profile in profiles):
                yield f"A CUDA graph gives {name} the shape {dims}, which no profile accepts"


def fits_profile(dims: list[int], span: list[list[int]] | None) -> bool:
    """Return whether a shape fits a profile's span of an input: its smallest, tuned and largest shape; None for no span."""
    return (
        span is not None
        and len(dims) == len(span[0])
        and all(low <= size <= high for size, low, high in zip(dims, span[0], span[2], strict=True))
    )
