"""`make check` of a merlin repository: a sound one has no findings, and each broken rule of a backend has one."""

import json
import shutil

import numpy as np
import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2 as pb
from typer.testing import CliRunner

from export.__main__ import app
from export.check import check_repository
from perf.tune.variant import seal_again
from repository.registry import record_publication
from repository.triton.config_rules import find_ensemble_faults
from repository.triton.models import read_config
from serving.contract.artifacts import write_manifest
from tests.long.merlin.breaking import EMBEDDINGS, edit, errors


@pytest.mark.parametrize("triton", ["24.03", "modern"])
def test_sound_repositories_have_no_findings(exported, triton):
    assert check_repository(exported[triton]) == []
    result = CliRunner().invoke(app, ["check", "--repo", str(exported[triton])])
    assert (result.exit_code, "0 errors, 0 warnings" in result.output) == (0, True)
    notes = [line for line in result.output.splitlines() if line.startswith("checked by format only: that ")]
    assert sum("TensorRT" in line or "Faiss" in line for line in notes) == 2
    assert sum("hps" in line for line in notes) == (2 if triton == "24.03" else 0)


def read_configs(folder):
    return [text_format.Parse(path.read_text(), pb.ModelConfig()) for path in sorted(folder.rglob("*.pbtxt"))]


@pytest.mark.parametrize("triton", ["24.03", "modern"])
def test_every_config_parses_with_the_official_protobuf(exported, triton):
    configs = read_configs(exported[triton])
    assert {config.name for config in configs} == {path.name for path in exported[triton].iterdir() if path.is_dir()}


class TestFiles:
    def test_a_missing_model(self, repository):
        (repository / "rank_dense" / "config.pbtxt").unlink()
        assert "rank_dense/config.pbtxt: The file is missing" in errors(repository)

    def test_a_missing_generation_of_the_model_that_callers_know(self, repository):
        shutil.rmtree(repository / "recommend" / "1")
        (found,) = errors(repository).splitlines()
        assert "recommend/1" in found

    def test_a_model_under_another_name(self, repository):
        edit(repository, EMBEDDINGS, lambda config: setattr(config, "name", "other"))
        assert f"{EMBEDDINGS}/config.pbtxt: It names the model 'other'" in errors(repository)

    def test_a_model_that_the_profile_lacks(self, repository):
        (repository / "hugectr").mkdir()
        assert "hugectr: The profile has no model of this name. Move it out" in errors(repository)

    @pytest.mark.parametrize(
        "file", ["rank_dense/1/model.onnx", "rank_embeddings/1/rank-*.model/emb_vector", "rank_features/1/item_rows.npy"]
    )
    def test_a_changed_file(self, repository, file):
        (path,) = repository.glob(file)
        path.write_bytes(path.read_bytes()[:-1] + b"x")
        assert f"{path.relative_to(repository)}: It is missing or not the file that was published" in errors(repository)

    def test_a_folder_of_another_generation(self, repository):
        folder = repository / "rank_scores" / "1"
        write_manifest(folder, stage="rank", generation=2)
        assert "rank_scores/1: It is not the one that this generation was published with" in errors(repository)

    def test_a_manifest_that_changed_since_its_publication(self, repository):
        record_publication(repository, 1, "exported from a log")
        assert check_repository(repository) == []
        path = repository / "recommend" / "1" / "manifest.json"
        path.write_text(path.read_text() + "\n")
        (finding,) = check_repository(repository)
        assert (finding.level, finding.where) == ("warning", "recommend/1/manifest.json")

    def test_an_engine_beside_the_network_is_no_change(self, repository):
        (repository / "rank_dense" / "1" / "model.plan").write_bytes(b"built where it runs")
        assert errors(repository) == ""


def warmup_input(name: str):
    """Return a function from a config to the input `name` of its first warm-up."""
    return lambda config: config.model_warmup[0].inputs[name]


class TestConfigs:
    """Configurations that Triton itself refuses, whichever backend serves the model."""

    @pytest.mark.parametrize(
        ("model", "change", "fact"),
        [
            (
                "rank_scores",
                lambda c: setattr(c, "default_model_filename", "rank.py"),
                "is 'rank.py'; for python the export writes",
            ),
            (
                "rank_dense",
                lambda c: setattr(c, "default_model_filename", "dense.plan"),
                "for tensorrt the export writes model.plan",
            ),
            (
                "rank_scores",
                lambda c: c.version_policy.specific.versions.append(7),
                "version_policy names [1, 7]; the ensembles are",
            ),
            (
                EMBEDDINGS,
                lambda c: c.ClearField("version_policy"),
                "version_policy names no version; the ensembles are pinned to 1",
            ),
            (
                "rank_features",
                lambda c: setattr(warmup_input("user")(c), "data_type", pb.TYPE_INT32),
                "sends user as TYPE_INT32, the model takes TYPE_UINT8",
            ),
            (
                "rank_features",
                lambda c: warmup_input("user")(c).dims.__setitem__(0, 3),
                "sends user with the dims [3], the model takes [",
            ),
            (
                "rank_features",
                lambda c: warmup_input("user")(c).dims.append(1),
                ", 1], the model takes [",
            ),
            ("rank_features", lambda c: warmup_input("more")(c).dims.append(1), "sends more, which the model does not take"),
            (
                "rank_features",
                lambda c: c.model_warmup[0].inputs.pop("user"),
                "lacks user, a required input",
            ),
            (
                "rank_features",
                lambda c: setattr(c.model_warmup[0], "batch_size", 65),
                "has a batch of 65; max_batch_size is 64",
            ),
            (
                "rank_dense",
                lambda c: warmup_input("embeddings")(c).dims.__setitem__(0, 0),
                "sends embeddings with the dims [0]",
            ),
        ],
    )
    def test_broken_rules(self, repository, model, change, fact):
        edit(repository, model, change)
        found = errors(repository)
        assert f"{model}/config.pbtxt: " in found
        assert fact in found

    def test_a_model_file_that_is_not_there(self, repository):
        (repository / "rank_scores" / "1" / "model.py").unlink()
        seal_again(repository, 1, "rank_scores")
        assert "rank_scores/config.pbtxt: 1/model.py is missing; the backend python opens it" in errors(repository)

    @pytest.mark.parametrize("name", ["tensorrt", "tensorrt_one_profile", "onnxruntime", "python"])
    def test_a_configuration_that_the_start_script_would_put_in_place(self, repository, name):
        path = repository / "rank_dense" / "configs" / f"{name}.pbtxt"
        config = read_config(path)
        config.default_model_filename = "other"
        path.write_text(text_format.MessageToString(config))
        assert f"rank_dense/configs/{name}.pbtxt: default_model_filename is 'other', expected 'model." in errors(repository)


class TestWiring:
    """The wiring of KEYS and NUMKEYS to the HPS backend."""

    @pytest.mark.parametrize(
        ("model", "change", "fact"),
        [
            (
                "rank",
                lambda c: c.ensemble_scheduling.step[1].input_map.__setitem__("KEYS", "pair_numbers"),
                "is fed by pair_numbers",
            ),
            (
                "rank",
                lambda c: c.ensemble_scheduling.step[1].input_map.pop("NUMKEYS"),
                "NUMKEYS of rank_embeddings is fed by nothing",
            ),
            ("rank", lambda c: c.ensemble_scheduling.step.pop(1), "The ensemble rank has no step rank_embeddings"),
            (
                "rank_features",
                lambda c: setattr(c.instance_group[0], "kind", pb.ModelInstanceGroup.KIND_GPU),
                "rank_features makes KEYS and is not KIND_CPU; the backend would read it from host memory",
            ),
            (
                EMBEDDINGS,
                lambda c: setattr(c, "max_batch_size", 8),
                "rank_embeddings has max_batch_size 8; behind hps nothing is",
            ),
            ("rank", lambda c: setattr(c, "max_batch_size", 8), "rank has max_batch_size 8; behind hps nothing is batched"),
        ],
    )
    def test_broken_rules(self, repository, model, change, fact):
        edit(repository, model, change)
        assert fact in errors(repository)

    def test_keys_and_their_numbers_exchanged(self, repository):
        def exchange(config):
            edges = config.ensemble_scheduling.step[1].input_map
            edges["KEYS"], edges["NUMKEYS"] = "NUMKEYS", "KEYS"

        edit(repository, "rank", exchange)
        assert "KEYS of rank_embeddings is fed by NUMKEYS; expected the output KEYS of a step" in errors(repository)


class TestEnsembles:
    def test_an_edge_between_two_types(self, repository):
        edit(repository, "rank_scores", lambda c: setattr(c.input[0], "data_type", pb.TYPE_INT64))
        assert "rank/config.pbtxt: Edge user -> rank_scores.user" in errors(repository)

    def test_an_edge_from_nowhere(self, repository):
        edit(repository, "rank", lambda c: c.ensemble_scheduling.step[0].input_map.__setitem__("candidates", "gone"))
        assert "Edge gone -> rank_features.candidates: the source is missing, the input is TYPE_UINT8 [" in errors(repository)

    def test_a_step_of_another_generation(self, repository):
        edit(repository, "rerank", lambda c: setattr(c.ensemble_scheduling.step[1], "model_version", 7))
        assert "Step rerank_network is pinned to 7, expected 1" in errors(repository)

    def test_one_name_for_an_input_and_an_output(self, repository):
        config = read_config(repository / "rerank" / "config.pbtxt")
        config.output.add(name="ranked", data_type=pb.TYPE_UINT8, dims=[1])
        configs = {path.parent.name: read_config(path) for path in repository.glob("*/config.pbtxt")}
        assert any("callers would get back what they sent" in fact for fact in find_ensemble_faults(config, configs, 1))


class TestNetworks:
    def test_the_tensorrt_backends_rules_are_asked(self, repository):
        edit(repository, "rank_dense", lambda c: c.ClearField("backend"))
        path = repository / "rank_dense" / "configs" / "tensorrt.pbtxt"
        config = read_config(path)
        config.max_batch_size = 1_000
        path.write_text(text_format.MessageToString(config))
        assert "rank_dense/config.pbtxt: max_batch_size 1000" in errors(repository)

    def test_answers_are_compared(self, repository):
        """The network is intact and sealed, but has other weights."""
        network = repository / "rank_dense" / "1" / "model.onnx"
        import onnx
        from onnx import numpy_helper

        model = onnx.load(str(network))
        for weights in model.graph.initializer:
            array = numpy_helper.to_array(weights)
            if array.dtype == np.float32 and array.ndim == 2:
                weights.CopyFrom(numpy_helper.from_array(array * np.float32(1.5), weights.name))
        onnx.save(model, str(network))
        seal_again(repository, 1, "rank_dense")
        assert "Recorded requests are answered differently" in errors(repository)


def test_more_candidates_than_a_gpu_index_gives(repository):
    folder = repository / "retrieve_search" / "1"
    info = json.loads((folder / "stage.json").read_text())
    info["axes"]["candidates"] = 3_000
    (folder / "stage.json").write_text(json.dumps(info))
    seal_again(repository, 1, "retrieve_search")
    assert "3000 candidates; Faiss gives at most 2048" in errors(repository)
