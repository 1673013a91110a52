"""`[merlin] precision` lowers the networks' precision, and answers stay those of the cpu profile."""

import json

import numpy as np
import onnx
import pytest

from export.nvidia.check import check_answers, check_tensorrt
from export.nvidia.pipeline import MerlinPipeline
from export.nvidia.precision.agreement import HALF, describe_disagreement
from export.nvidia.publish import publish_merlin
from export.settings import Settings
from repository.checks.recorded import RECORDED_FILE, read_recorded
from tests.long.merlin.conftest import source_of

MARK = {"fp32": None, "fp16": "Cast", "int8": "QuantizeLinear"}  # the operator that shows the precision


@pytest.mark.parametrize(("triton", "precision"), [("24.03", "int8"), ("modern", "fp16")])
def test_ranker_and_reranker_get_the_lowest_precision_that_keeps_their_answers(cpu, tmp_path, triton, precision):
    repository, said = tmp_path / "repository", list[str]()
    settings = Settings.model_validate({"merlin": {"triton": triton, "precision": precision}})
    publish_merlin(source_of(cpu), repository, settings, said.append)
    assert [line.split(":")[0] for line in said] == ["rank", "rerank"]
    found = []
    for name in ("rank_dense", "rerank_network", "towers_user"):
        version = repository / name / "1"
        engine = json.loads((version / "engine.json").read_text())
        nodes = {node.name: node.op_type for node in onnx.load(str(version / "model.onnx")).graph.node}
        assert {mark for mark in MARK.values() if mark in nodes.values()} == {*filter(None, [MARK[engine["precision"]]])}
        assert bool(engine["fp32_nodes"]) == (engine["precision"] == "fp16")
        assert set(engine["fp32_nodes"]) <= nodes.keys()
        found.append(engine["precision"])
    assert precision in found
    assert found[-1] == "fp32"
    recorded = read_recorded(cpu / "recommend" / "1" / RECORDED_FILE)
    answers = MerlinPipeline(repository, 1, "/models")(recorded.inputs)
    assert describe_disagreement(precision, answers, recorded.outputs) == ""
    if precision == "fp16":
        assert 0 < np.abs(answers["scores"] - recorded.outputs["scores"]).max() <= HALF
    assert [*check_tensorrt(repository), *check_answers(repository)] == []
