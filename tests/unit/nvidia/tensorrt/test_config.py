"""config.pbtxt of TensorRT models: what tritonserver's TensorRT backend demands at load, checked on the parsed protobuf."""

import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2 as pb

from export.nvidia.tensorrt.config import make_onnxruntime_config, make_python_config, make_tensorrt_config
from export.nvidia.tensorrt.profiles import Range, find_largest_batch, make_shape_profiles
from serving.contract.errors import ConfigError
from serving.contract.tensors import TensorSpec

INPUTS = (TensorSpec("user_numbers", "FP32", (5,)), TensorSpec("item_rows", "FP32", (256, 3, 16)))
OUTPUTS = (TensorSpec("logits", "FP32", (256,)),)
ROWS = (TensorSpec("user_numbers", "FP32", (-1, 5)), TensorSpec("vectors", "FP32", (-1,)))  # behind hps: no batch axis
ROWS_OUT = (TensorSpec("logits", "FP32", (-1, 256)),)


def batched(**changes) -> pb.ModelConfig:
    profiles = make_shape_profiles(INPUTS, 64, (8, 32))
    return make_tensorrt_config("rank_dense", INPUTS, OUTPUTS, 64, profiles, [3], preferred_batch_sizes=(8, 32), **changes)


def unbatched() -> pb.ModelConfig:
    profiles = make_shape_profiles(ROWS, 0, (8,), largest_rows=64, per_row={"vectors": 48})
    return make_tensorrt_config("rank_dense", ROWS, ROWS_OUT, 0, profiles, [3])


def test_profiles_span_every_batch_and_are_tuned_for_one_row_and_each_preferred_size():
    profiles = make_shape_profiles(INPUTS, 64, (8, 32))
    assert [p["user_numbers"] for p in profiles] == [Range((1, 5), (n, 5), (64, 5)) for n in (1, 8, 32)]
    assert {p["item_rows"].minimum for p in profiles} == {(1, 256, 3, 16)}
    assert find_largest_batch(profiles) == 64


def test_without_a_batch_axis_the_rows_are_an_axis_of_the_dims_and_flat_inputs_have_many_per_row():
    (one, eight) = make_shape_profiles(ROWS, 0, (8,), largest_rows=64, per_row={"vectors": 48})
    assert one["vectors"] == Range((48,), (48,), (64 * 48,))
    assert eight["vectors"] == Range((48,), (8 * 48,), (64 * 48,))
    assert eight["user_numbers"] == Range((1, 5), (8, 5), (64, 5))


@pytest.mark.parametrize(
    ("inputs", "max_batch_size", "tuned_for", "message"),
    [
        (ROWS, 64, (), "Expected fixed dims"),
        (INPUTS, 0, (), "exactly one -1"),
        (INPUTS, 64, (65,), r"tuned for \[65\] rows"),
        (INPUTS, 64, (0,), r"tuned for \[0\] rows"),
    ],
)
def test_profiles_refuse_shapes_that_cannot_be_served(inputs, max_batch_size, tuned_for, message):
    with pytest.raises(ConfigError, match=message):
        make_shape_profiles(inputs, max_batch_size, tuned_for, largest_rows=64)


def test_profiles_need_a_largest_batch():
    with pytest.raises(ConfigError, match="at most 0 rows"):
        make_shape_profiles(INPUTS, 0)


@pytest.mark.parametrize("make", [batched, unbatched])
@pytest.mark.parametrize("stand_in", [lambda config: config, make_onnxruntime_config, make_python_config])
def test_every_config_survives_the_official_parser(make, stand_in):
    config = stand_in(make())
    assert text_format.Parse(text_format.MessageToString(config), pb.ModelConfig()) == config


def test_instances_live_on_gpus_and_name_every_profile():
    config = batched(gpus=(0, 1), instances=2)
    (group,) = config.instance_group
    assert (group.kind, group.count, list(group.gpus)) == (pb.ModelInstanceGroup.KIND_GPU, 2, [0, 1])
    assert list(group.profile) == ["0", "1", "2"]
    assert (config.platform, config.backend, config.default_model_filename) == ("tensorrt_plan", "tensorrt", "model.plan")


def test_cuda_graphs_cover_every_batch_size_once():
    graphs = batched().optimization.cuda.graph_spec
    spans = [(graph.graph_lower_bound.batch_size, graph.batch_size) for graph in graphs]
    assert [size for low, high in spans for size in range(low, high + 1)] == list(range(1, 65))
    for graph in graphs:
        assert {name: tuple(shape.dim) for name, shape in graph.input.items()} == {t.name: t.dims for t in INPUTS}
        assert {name: tuple(shape.dim) for name, shape in graph.graph_lower_bound.input.items()} == {
            t.name: t.dims for t in INPUTS
        }


def test_a_model_without_a_batch_axis_has_no_graphs_because_the_backend_would_launch_none():
    assert batched().optimization.cuda.graphs
    assert not unbatched().optimization.cuda.graphs
    assert not unbatched().optimization.cuda.graph_spec


def test_a_model_without_a_batch_axis_is_never_batched():
    assert not unbatched().HasField("dynamic_batching")
    assert list(batched().dynamic_batching.preferred_batch_size) == [8, 32]


@pytest.mark.parametrize("make", [batched, unbatched])
def test_warm_up_runs_one_row_and_the_most(make):
    config = make()
    largest = [w.batch_size if config.max_batch_size else w.inputs["user_numbers"].dims[0] for w in config.model_warmup]
    assert largest == [1, 64]
    assert all(entry.zero_data and -1 not in entry.dims for w in config.model_warmup for entry in w.inputs.values())


def test_a_batch_that_no_profile_accepts_is_refused():
    with pytest.raises(ConfigError, match="batches of 64, and no profile accepts more than 32"):
        make_tensorrt_config("rank_dense", INPUTS, OUTPUTS, 64, make_shape_profiles(INPUTS, 32), [1])


def test_strings_and_machines_without_a_gpu_are_refused():
    texts = (TensorSpec("store", "BYTES", (1,)),)
    with pytest.raises(ConfigError, match="string tensors"):
        make_tensorrt_config("rank_dense", texts, OUTPUTS, 8, make_shape_profiles(texts, 8), [1])
    with pytest.raises(ConfigError, match="has no GPU"):
        batched(gpus=())


@pytest.mark.parametrize(("stand_in", "file"), [(make_onnxruntime_config, "model.onnx"), (make_python_config, "model.py")])
def test_stand_ins_serve_the_same_tensors_without_what_only_tensorrt_knows(stand_in, file):
    plan, other = batched(), stand_in(batched())
    for field in ("name", "max_batch_size", "input", "output", "version_policy", "dynamic_batching", "model_warmup"):
        assert getattr(other, field) == getattr(plan, field)
    assert other.default_model_filename == file
    assert not other.platform
    assert not other.HasField("optimization")
    assert not any(group.profile for group in other.instance_group)
    assert all(group.kind != pb.ModelInstanceGroup.KIND_GPU and not group.gpus for group in other.instance_group)
