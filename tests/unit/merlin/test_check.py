"""`make check` on a merlin repository: sound ones have no findings, each rule of the backends that is broken has one."""

import json

import numpy as np
import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2 as pb
from typer.testing import CliRunner

from export.__main__ import app
from export.merlin.check import BY_FORMAT_ONLY, ensemble_faults
from export.repository.check import check_repository
from hps_config.parsers import load_json
from server.repository import read_config, write_config
from stages.artifacts import MANIFEST_FILE, read_json, write_manifest

EMBEDDINGS = "rank_embeddings"


def errors(repository) -> str:
    return "\n".join(f"{f.where}: {f.fact}. {f.remedy}" for f in check_repository(repository) if f.level == "error")


def edit(repository, model: str, change) -> None:
    path = repository / model / "config.pbtxt"
    config = read_config(path)
    change(config)
    write_config(path, config)


def edit_ps(repository, **changes) -> None:
    document = load_json(repository / "ps.json")
    document["models"][0] |= changes
    (repository / "ps.json").write_text(json.dumps({k: v for k, v in document.items() if v is not None}))


@pytest.mark.parametrize("triton", ["24.03", "modern"])
def test_sound_repositories_have_no_findings(exported, triton):
    assert check_repository(exported[triton]) == []
    result = CliRunner().invoke(app, ["check", "--repo", str(exported[triton])])
    assert (result.exit_code, "0 errors, 0 warnings" in result.output) == (0, True)
    assert result.output.count("checked by format only") == len(BY_FORMAT_ONLY)


def every_config(folder):
    return [text_format.Parse(path.read_text(), pb.ModelConfig()) for path in sorted(folder.rglob("*.pbtxt"))]


@pytest.mark.parametrize("triton", ["24.03", "modern"])
def test_every_config_parses_with_the_official_protobuf(exported, triton):
    configs = every_config(exported[triton])
    assert {config.name for config in configs} == {path.name for path in exported[triton].iterdir() if path.is_dir()}


class TestFiles:
    def test_a_missing_model(self, repository):
        (repository / "rank_dense" / "config.pbtxt").unlink()
        assert "rank_dense/config.pbtxt: The file is missing" in errors(repository)

    def test_a_model_under_another_name(self, repository):
        edit(repository, EMBEDDINGS, lambda config: setattr(config, "name", "other"))
        assert f"{EMBEDDINGS}/config.pbtxt: It names the model 'other'" in errors(repository)

    def test_a_stranger(self, repository):
        (repository / "hugectr").mkdir()
        assert "hugectr: It is no model of this profile. Move it out" in errors(repository)

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
        assert "rank_scores/1: It is not the one this generation was published with" in errors(repository)

    def test_an_engine_beside_the_network_is_no_change(self, repository):
        (repository / "rank_dense" / "1" / "model.plan").write_bytes(b"built where it runs")
        assert errors(repository) == ""

    def test_a_missing_warm_up_file(self, repository):
        next((repository / "rank_features" / "warmup").iterdir()).unlink()
        assert "rank_features/warmup/" in errors(repository)


class TestHpsModel:
    """Each rule the backend has for config.pbtxt."""

    @pytest.mark.parametrize(
        ("change", "fact"),
        [
            (lambda c: setattr(c.input[0], "data_type", pb.TYPE_INT32), "the backend takes KEYS TYPE_INT64"),
            (lambda c: setattr(c.input[1], "name", "COUNTS"), "the backend takes KEYS TYPE_INT64 and NUMKEYS"),
            (lambda c: c.input.pop(), "the backend takes KEYS TYPE_INT64 and NUMKEYS"),
            (lambda c: setattr(c.output[0], "data_type", pb.TYPE_FP16), "not exactly one output of TYPE_FP32"),
            (lambda c: c.output.add(name="MORE", data_type=pb.TYPE_FP32, dims=[-1]), "not exactly one output"),
            (lambda c: setattr(c.output[0], "name", "ROWS"), "Its output is not called OUTPUT0"),
            (lambda c: c.input[0].dims.__setitem__(0, 1), "the backend wants a first one of -1"),
            (lambda c: c.input[0].dims.pop(), "do not arrive with two axes"),
            (lambda c: c.dynamic_batching.SetInParent(), "dynamic_batching: rows of several requests"),
            (lambda c: c.instance_group.pop(), "There is no instance_group"),
            (lambda c: setattr(c.instance_group[0], "kind", pb.ModelInstanceGroup.KIND_CPU), "is not KIND_GPU with gpus"),
            (lambda c: c.instance_group[0].gpus.append(3), "deployed_device_list of ps.json lacks"),
            (lambda c: c.instance_group[0].gpus.append(3), "all instances would use the last one"),
            (lambda c: setattr(c.instance_group[0], "count", 3), "3 instances share 2 worker buffers"),
            (lambda c: setattr(c.parameters["refresh_interval"], "string_value", "0.5"), "only whole seconds are read"),
        ],
    )
    def test_broken_rules(self, repository, change, fact):
        edit(repository, EMBEDDINGS, change)
        assert fact in errors(repository)

    def test_a_refresh_that_refreshes_nothing(self, repository):
        edit_ps(repository, cache_refresh_percentage_per_iteration=0.0)
        edit(repository, EMBEDDINGS, lambda c: setattr(c.parameters["refresh_interval"], "string_value", "5"))
        assert "cache_refresh_percentage_per_iteration of ps.json is 0" in errors(repository)

    def test_updates_that_the_gpu_never_sees(self, repository):
        document = load_json(repository / "ps.json") | {"update_source": {"type": "kafka", "brokers": "kafka:9092"}}
        (repository / "ps.json").write_text(json.dumps(document))
        warnings = [finding.fact for finding in check_repository(repository) if finding.level == "warning"]
        assert any("a row that the GPU has cached never changes" in fact for fact in warnings)
        edit(repository, EMBEDDINGS, lambda c: setattr(c.parameters["refresh_interval"], "string_value", "5"))
        assert check_repository(repository) == []


class TestPsJson:
    """What both parsers need, and what they pass over in silence. tests/unit/hps has a test for each key."""

    @pytest.mark.parametrize(
        ("changes", "fact"),
        [
            ({"model": "rank"}, "names no model 'rank_embeddings'"),
            ({"embedding_vecsize_per_table": [16, 16]}, "embedding_vecsize_per_table"),
            ({"max_batch_size": 8}, "max_batch_size of ps.json is 8; callers may send 64"),
            ({"maxnum_catfeature_query_per_table_per_sample": [5]}, "counts 5 keys per sample"),
            ({"sparse_files": ["/elsewhere/rank.model"]}, "outside of /models"),
            ({"sparse_files": ["/models/rank_embeddings/1/none.model"]}, "is missing or empty"),
            ({"row_format_per_table": ["int8"]}, "HPS serves fp32 whatever it says"),
            ({"num_of_refresher_buffer_in_pool": 0}, "a refresh would spin for ever"),
        ],
    )
    def test_broken_rules(self, repository, changes, fact):
        edit_ps(repository, **changes)
        assert fact in errors(repository)

    def test_answers_that_are_not_exact_are_warned_of(self, repository):
        edit_ps(repository, hit_rate_threshold=0.9)
        warnings = [finding.fact for finding in check_repository(repository) if finding.level == "warning"]
        assert any("gets default vectors for its misses" in fact for fact in warnings)

    def test_two_tables_where_the_keys_are_of_one(self, repository):
        document = load_json(repository / "ps.json")
        model = document["models"][0]
        for name, value in model.items():
            if isinstance(value, list) and name != "deployed_device_list":
                model[name] = value * 2
        model["embedding_table_names"] = ["rank", "more"]
        (repository / "ps.json").write_text(json.dumps(document))
        assert "names 2 tables; rank_features sends the keys of one" in errors(repository)

    def test_a_table_that_lacks_keys(self, repository):
        (folder,) = (repository / EMBEDDINGS / "1").glob("rank-*.model")
        width = load_json(repository / "ps.json")["models"][0]["embedding_vecsize_per_table"][0]
        keys = np.fromfile(folder / "key", "<i8")
        kept = keys < 20
        vectors = np.fromfile(folder / "emb_vector", "<f4").reshape(-1, width)
        keys[kept].tofile(folder / "key")
        vectors[kept].tofile(folder / "emb_vector")
        reseal(repository, EMBEDDINGS)
        assert "rank_features sends keys up to" in errors(repository)
        (keys[kept] + 1).tofile(folder / "key")
        reseal(repository, EMBEDDINGS)
        assert "are not 0 to 19" in errors(repository)


def reseal(repository, model: str) -> None:
    """The manifests of what lies there now, as if it had been published so."""
    from stages.artifacts import sha256_of

    write_manifest(repository / model / "1", generation=1)
    own = repository / "recommend" / "1"
    facts = {k: v for k, v in read_json(own, MANIFEST_FILE).items() if k not in ("schema", "files")}
    facts["stages"][model] = sha256_of(repository / model / "1" / MANIFEST_FILE)
    write_manifest(own, **facts)


class TestEnsembles:
    def test_an_edge_between_two_types(self, repository):
        edit(repository, "rank_scores", lambda c: setattr(c.input[0], "data_type", pb.TYPE_INT64))
        assert "rank/config.pbtxt: Edge logits -> rank_scores.logits" in errors(repository)

    def test_an_edge_from_nowhere(self, repository):
        edit(repository, "rank", lambda c: c.ensemble_scheduling.step[0].input_map.__setitem__("candidate_ids", "gone"))
        assert "Edge gone -> rank_features.candidate_ids: None meets" in errors(repository)

    def test_batches_around_a_model_that_has_none(self, repository):
        edit(repository, "rank", lambda c: setattr(c, "max_batch_size", 8))
        assert "It allows batches of 8, and its step rank_embeddings of 0" in errors(repository)

    def test_a_step_of_another_generation(self, repository):
        edit(repository, "rerank", lambda c: setattr(c.ensemble_scheduling.step[1], "model_version", 7))
        assert "Step rerank_network is pinned to 7, expected 1" in errors(repository)

    def test_one_name_for_what_comes_in_and_what_goes_out(self, repository):
        config = read_config(repository / "rerank" / "config.pbtxt")
        config.output.add(name="degraded", data_type=pb.TYPE_INT32, dims=[1])
        configs = {path.parent.name: read_config(path) for path in repository.glob("*/config.pbtxt")}
        assert any("callers would get back what they sent" in fact for fact in ensemble_faults(config, configs, 1))


class TestNetworks:
    def test_the_tensorrt_backends_rules_are_asked(self, repository):
        edit(repository, "rank_dense", lambda c: c.ClearField("backend"))
        path = repository / "rank_dense" / "configs" / "tensorrt.pbtxt"
        config = read_config(path)
        config.max_batch_size = 1_000
        path.write_text(text_format.MessageToString(config))
        assert "rank_dense/config.pbtxt: max_batch_size 1000" in errors(repository)

    def test_answers_are_compared(self, repository):
        """A network that is whole, sealed, and another one."""
        network = repository / "rank_dense" / "1" / "model.onnx"
        import onnx
        from onnx import numpy_helper

        model = onnx.load(str(network))
        for weights in model.graph.initializer:
            array = numpy_helper.to_array(weights)
            if array.dtype == np.float32 and array.ndim == 2:
                weights.CopyFrom(numpy_helper.from_array(array * np.float32(1.5), weights.name))
        onnx.save(model, str(network))
        reseal(repository, "rank_dense")
        assert "Recorded requests are answered differently" in errors(repository)


def test_more_candidates_than_a_gpu_index_gives(repository):
    folder = repository / "retrieve_search" / "1"
    info = json.loads((folder / "stage.json").read_text())
    info["axes"]["candidates"] = 3_000
    (folder / "stage.json").write_text(json.dumps(info))
    reseal(repository, "retrieve_search")
    assert "3000 candidates; Faiss gives at most 2048" in errors(repository)
