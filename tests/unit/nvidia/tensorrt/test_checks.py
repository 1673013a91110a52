"""Each rule of the TensorRT backend, broken on its own."""

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2 as pb

from export.nvidia.pipeline import MerlinPipeline
from export.nvidia.tensorrt.checks import check_tensorrt_model
from repository.triton.models import write_config
from serving.contract.errors import ArtifactError


def facts(version: Path, change=lambda config: None) -> list[str]:
    """Return the findings on a model whose TensorRT config was changed by hand."""
    for path in (version.parent / "config.pbtxt", version.parent / "configs" / "tensorrt.pbtxt"):
        config = text_format.Parse(path.read_text(), pb.ModelConfig())
        change(config)
        path.write_text(text_format.MessageToString(config))
    return [finding.fact for finding in check_tensorrt_model(version.parent)]


def test_what_the_export_writes_breaks_no_rule(version):
    assert facts(version) == []


def rename_input(config):
    config.input[0].name = "z"


def change_type(config):
    config.input[0].data_type = pb.TYPE_INT64


def add_axis(config):
    config.input[0].dims.append(7)


def on_cpu(config):
    config.instance_group[0].kind = pb.ModelInstanceGroup.KIND_CPU


def nowhere(config):
    del config.instance_group[:]


def without_gpus(config):
    del config.instance_group[0].gpus[:]


def unknown_profile(config):
    config.instance_group[0].profile.append("7")


def bigger_batch(config):
    config.max_batch_size = 16


def prefer_too_much(config):
    config.dynamic_batching.preferred_batch_size.append(9)


def other_dims(config):
    config.input[0].dims[0] = 4


def no_batch(config):
    config.max_batch_size = 0
    config.input[0].dims.insert(0, -1)
    config.output[0].dims.insert(0, -1)


def graph_too_big(config):
    config.optimization.cuda.graph_spec[0].batch_size = 9


def graph_upside_down(config):
    config.optimization.cuda.graph_spec[1].graph_lower_bound.batch_size = 5


def graph_of_nothing(config):
    config.optimization.cuda.graph_spec[0].input.clear()


@pytest.mark.parametrize(
    ("change", "fact"),
    [
        (rename_input, "It names the inputs ['z'], the network has ['x']"),
        (change_type, "x is TYPE_INT64, which the network does not take"),
        (add_axis, "x has 3 axes with the batch, the network 2"),
        (add_axis, "profile 0 gives x 2 axes, expected 3"),
        (on_cpu, "An instance_group is not KIND_GPU with gpus; the TensorRT backend has no other"),
        (without_gpus, "An instance_group is not KIND_GPU with gpus; the TensorRT backend has no other"),
        (nowhere, "There is no instance_group: the profiles would not be named"),
        (unknown_profile, "instance_group names the profiles ['7'], engine.json has 2"),
        (bigger_batch, "max_batch_size 16, and no profile accepts more than 8 rows"),
        (prefer_too_much, "preferred_batch_size [9] above max_batch_size 8"),
        (other_dims, "x with dims [4] lies outside profile 0: [1, 3] to [8, 3]"),
        (no_batch, "dynamic_batching with max_batch_size 0: there is no axis to batch on"),
        (no_batch, "A CUDA graph of batch size 1 with max_batch_size 0"),
        (
            no_batch,
            "CUDA graphs with max_batch_size 0: the backend records them for batch size 0, looks for 1, and launches none",
        ),
        (no_batch, "The profiles ['1'] with max_batch_size 0: only the one tuned for the fewest rows runs"),
        (graph_too_big, "A CUDA graph of batch size 9 with max_batch_size 8"),
        (graph_too_big, "A CUDA graph gives x the shape [9, 3], which no profile accepts"),
        (graph_upside_down, "A CUDA graph of batch size 4 from 5 on"),
        (graph_of_nothing, "A CUDA graph for the inputs []; it must name all of them"),
    ],
)
def test_each_rule_is_checked(version, change, fact):
    assert fact in facts(version, change)


def test_what_the_start_script_needs_must_be_there(version):
    (version / "model.py").unlink()
    assert facts(version) == ["model.py missing"]
    (version.parent / "configs" / "onnxruntime.pbtxt").unlink()
    assert facts(version) == ["configs/ lacks onnxruntime: the start script could not fall back"]


@pytest.mark.parametrize("name", ["onnxruntime", "python"])
def test_a_stand_in_that_needs_a_gpu_is_a_warning(version, name):
    path = version.parent / "configs" / f"{name}.pbtxt"
    config = text_format.Parse(path.read_text(), pb.ModelConfig())
    config.instance_group[0].gpus.append(0)
    path.write_text(text_format.MessageToString(config))
    (finding,) = check_tensorrt_model(version.parent)
    assert (finding.level, finding.where) == ("warning", f"rank_dense/configs/{name}.pbtxt")
    assert "tritonserver would refuse the stand-in where there is none" in finding.fact


def test_a_model_that_fell_back_is_a_warning(version):
    (version.parent / "config.pbtxt").write_text((version.parent / "configs" / "python.pbtxt").read_text())
    (finding,) = check_tensorrt_model(version.parent)
    assert finding.level == "warning"
    assert "served by ONNX Runtime" in finding.fact


@pytest.mark.parametrize("name", ["tensorrt", "onnxruntime", "python"])
def test_answers_are_those_of_the_network_whichever_config_the_start_script_chose(version, name):
    """`make check` compares answers on repositories that served by ONNX Runtime too."""
    (version.parent / "config.pbtxt").write_text((version.parent / "configs" / f"{name}.pbtxt").read_text())
    ensemble = pb.ModelConfig(name="recommend", platform="ensemble")
    ensemble.output.add(name="y")
    step = ensemble.ensemble_scheduling.step.add(model_name="rank_dense", model_version=1)
    step.input_map["x"], step.output_map["y"] = "x", "y"
    (version.parents[1] / "recommend").mkdir()
    write_config(version.parents[1] / "recommend" / "config.pbtxt", ensemble)
    answers = MerlinPipeline(version.parents[1], 1, "/models")({"x": np.ones((2, 3), np.float32)})
    np.testing.assert_array_equal(answers["y"], [[0, 3], [0, 3]])  # relu of the sums of the weight's columns


def test_a_fixed_first_axis_cannot_be_batched(version):
    model = onnx.load(str(version / "model.onnx"))
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 8
    onnx.save(model, str(version / "model.onnx"))
    assert facts(version) == ["x has a fixed first axis, and Triton must be able to batch on it"]


def test_operators_that_the_oldest_tensorrt_may_not_know_are_a_warning(version):
    model = onnx.load(str(version / "model.onnx"))
    model.graph.node[-1].op_type = "Gelu"
    model.opset_import[0].version = 20
    onnx.save(model, str(version / "model.onnx"))
    found = list(check_tensorrt_model(version.parent))
    assert {finding.level for finding in found} == {"warning"}
    assert [finding.fact for finding in found] == [
        "It uses Gelu, which are not among the operators looked up for TensorRT 8.6",
        "Its opset is 20; TensorRT 8.6 reads up to 17",
    ]


@pytest.mark.parametrize("text", ["{", json.dumps({"precision": "fp32"}), "[]"])
def test_an_unreadable_engine_description_is_an_error(version, text):
    (version / "engine.json").write_text(text)
    with pytest.raises(ArtifactError, match="does not describe an engine"):
        facts(version)


def test_a_network_that_is_none_is_an_error(version):
    (version / "model.onnx").write_bytes(b"junk")
    with pytest.raises(ArtifactError, match="is not an ONNX file"):
        facts(version)


@pytest.mark.parametrize("change", [on_cpu, unknown_profile, bigger_batch])
def test_a_config_that_the_start_script_would_replace_is_an_error(version, change):
    """Changed by hand, and not under configs/: the change would be gone at the next start, unseen."""
    path = version.parent / "config.pbtxt"
    config = text_format.Parse(path.read_text(), pb.ModelConfig())
    change(config)
    path.write_text(text_format.MessageToString(config))
    (finding,) = check_tensorrt_model(version.parent)
    assert finding.level == "error"
    assert "It is none of those in configs/" in finding.fact
