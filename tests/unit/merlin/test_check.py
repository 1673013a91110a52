"""`make check` on a merlin repository: sound ones have no findings, each rule of the backends that is broken has one."""

import json
import shutil

import numpy as np
import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2 as pb
from typer.testing import CliRunner

from export.__main__ import app
from export.merlin.check import ensemble_faults
from export.repository.check import check_repository
from hps_config.parsers import load_json
from server.repository import read_config, write_config
from stages.artifacts import MANIFEST_FILE, read_json, write_manifest

EMBEDDINGS = "rank_embeddings"
REQUIRED = [  # by parser B, and by A what has no default
    *("model", "sparse_files", "max_batch_size", "embedding_vecsize_per_table", "maxnum_catfeature_query_per_table_per_sample"),
    *("default_value_for_each_table", "deployed_device_list", "gpucache", "hit_rate_threshold", "gpucacheper"),
    "num_of_worker_buffer_in_pool",
]
PER_TABLE = [
    *("embedding_table_names", "embedding_vecsize_per_table", "maxnum_catfeature_query_per_table_per_sample"),
    *("default_value_for_each_table", "row_format_per_table"),
]
KAFKA = {"update_source": {"type": "kafka", "brokers": "kafka:9092"}}
ROCKS = {"type": "rocks_db", "path": "/var/lib/hps/rocksdb"}


def errors(repository) -> str:
    return "\n".join(f"{f.where}: {f.fact}. {f.remedy}" for f in check_repository(repository) if f.level == "error")


def edit(repository, model: str, change) -> None:
    path = repository / model / "config.pbtxt"
    config = read_config(path)
    change(config)
    write_config(path, config)


def edit_ps(repository, **changes) -> None:
    """Keys of the model; None takes one out."""
    document = load_json(repository / "ps.json")
    document["models"][0] = {k: v for k, v in (document["models"][0] | changes).items() if v is not None}
    (repository / "ps.json").write_text(json.dumps(document))


@pytest.mark.parametrize("triton", ["24.03", "modern"])
def test_sound_repositories_have_no_findings(exported, triton):
    assert check_repository(exported[triton]) == []
    result = CliRunner().invoke(app, ["check", "--repo", str(exported[triton])])
    assert (result.exit_code, "0 errors, 0 warnings" in result.output) == (0, True)
    said = [line for line in result.output.splitlines() if line.startswith("checked by format only: that ")]
    assert sum("TensorRT" in line or "Faiss" in line for line in said) == 2
    assert sum("hps" in line for line in said) == (2 if triton == "24.03" else 0)


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

    def test_a_missing_generation_of_the_model_that_callers_know(self, repository):
        shutil.rmtree(repository / "recommend" / "1")
        (found,) = errors(repository).splitlines()
        assert "recommend/1" in found

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
        path = next((repository / "rank_features" / "warmup").iterdir())
        path.unlink()
        assert f"rank_features/config.pbtxt: warmup/{path.name}: The file is missing" in errors(repository)

    def test_a_cut_warm_up_file(self, repository):
        path = repository / "rank_features" / "warmup" / "history_ids_0"
        path.write_bytes(path.read_bytes()[:-1])
        assert "warmup/history_ids_0 holds 511 bytes, a row of its tensor takes 512" in errors(repository)


def of_warmup(name: str):
    """-> (config -> the tensor of its first warm-up)."""
    return lambda config: config.model_warmup[0].inputs[name]


class TestConfigs:
    """What Triton itself refuses, whichever backend serves the model."""

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
                lambda c: setattr(of_warmup("history_ids")(c), "data_type", pb.TYPE_INT32),
                "sends history_ids as TYPE_INT32, the model takes TYPE_INT64",
            ),
            (
                "rank_features",
                lambda c: of_warmup("history_ids")(c).dims.__setitem__(0, 3),
                "sends history_ids with the dims [3], the model takes [64]",
            ),
            (
                "rank_features",
                lambda c: of_warmup("history_ids")(c).dims.append(1),
                "with the dims [64, 1], the model takes [64]",
            ),
            ("rank_features", lambda c: of_warmup("more")(c).dims.append(1), "sends more, which the model does not take"),
            (
                "rank_features",
                lambda c: c.model_warmup[0].inputs.pop("history_ids"),
                "lacks history_ids, which the model must be sent",
            ),
            (
                "rank_features",
                lambda c: setattr(c.model_warmup[0], "batch_size", 65),
                "has a batch of 65; max_batch_size is 64",
            ),
            ("rank_dense", lambda c: of_warmup("embeddings")(c).dims.__setitem__(0, 0), "sends embeddings with the dims [0]"),
        ],
    )
    def test_broken_rules(self, repository, model, change, fact):
        edit(repository, model, change)
        assert f"{model}/config.pbtxt: " in errors(repository)
        assert fact in errors(repository)

    def test_a_model_file_that_is_not_there(self, repository):
        (repository / "rank_scores" / "1" / "model.py").unlink()
        reseal(repository, "rank_scores")
        assert "rank_scores/config.pbtxt: 1/model.py is missing, which python opens" in errors(repository)

    @pytest.mark.parametrize("name", ["tensorrt", "tensorrt_one_profile", "onnxruntime", "python"])
    def test_a_configuration_that_the_start_script_would_put_in_place(self, repository, name):
        path = repository / "rank_dense" / "configs" / f"{name}.pbtxt"
        config = read_config(path)
        config.default_model_filename = "other"
        path.write_text(text_format.MessageToString(config))
        assert f"rank_dense/configs/{name}.pbtxt: default_model_filename is 'other', expected 'model." in errors(repository)


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
            (lambda c: setattr(c.parameters["refresh_interval"], "string_value", "-1"), "only whole seconds are read"),
            (lambda c: setattr(c.parameters["refresh"], "string_value", "5"), "parameters refresh are not read by the backend"),
            (lambda c: c.instance_group[0].gpus.__setitem__(0, 1), "deployed_device_list of ps.json lacks"),
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
            (
                {"deployed_device_list": [0, 1]},
                "deployed_device_list of ps.json ends with GPU 1, where all instances would run",
            ),
            ({"deployed_device_list": [1]}, "It runs on the GPUs [0], which deployed_device_list of ps.json lacks"),
            ({"refresh_interval": 5}, "refresh_interval of ps.json is 5; the backend goes by that of config.pbtxt, 0"),
            ({"cache_refresh_percentage_per_iteration": 1.5}, "Expected a share from 0 to 1"),
            ({"embedding_table_names": ["rank.1"]}, "Expected 1 to 120 of A-Z a-z 0-9 _ -"),
            ({"model": "rank.embeddings"}, "Expected 1 to 120 of A-Z a-z 0-9 _ -"),
        ],
    )
    def test_broken_rules(self, repository, changes, fact):
        edit_ps(repository, **changes)
        assert fact in errors(repository)

    @pytest.mark.parametrize("key", REQUIRED)
    def test_every_required_key(self, repository, key):
        edit_ps(repository, **{key: None})
        assert f"ps.json models[0].{key}: is missing" in errors(repository)

    @pytest.mark.parametrize("key", PER_TABLE)
    @pytest.mark.parametrize("times", [0, 2])
    def test_arrays_of_another_length_than_the_tables(self, repository, key, times):
        value = load_json(repository / "ps.json")["models"][0][key]
        edit_ps(repository, **{key: value * times})
        assert f"ps.json models[0].{key}: has {times} values for 1 sparse files. Expected 1" in errors(repository)

    @pytest.mark.parametrize(
        ("top", "fact"),
        [
            ({"supportlonglong": False}, "The hps backend takes INT64 keys only"),
            ({"fuse_embedding_table": True}, "The hps backend disagrees with fused caches"),
            ({"models": []}, "Expected at least one model"),
        ],
    )
    def test_what_holds_for_the_whole_file(self, repository, top, fact):
        (repository / "ps.json").write_text(json.dumps(load_json(repository / "ps.json") | top))
        assert fact in errors(repository)

    def test_each_fault_is_told_once(self, repository):
        edit_ps(repository, gpucacheper=None)
        (finding,) = check_repository(repository)
        assert finding.where == "ps.json models[0].gpucacheper"
        (repository / "ps.json").write_text(json.dumps({"supportlonglong": True, "models": []}))
        (finding,) = check_repository(repository)
        assert finding.where == "ps.json models"

    def test_comments(self, repository):
        text = (repository / "ps.json").read_text()
        (repository / "ps.json").write_text(text.replace("{", "{ // a comment\n", 1))
        assert "Expected strict JSON, without comments" in errors(repository)

    @pytest.mark.parametrize(
        ("changes", "top", "fact"),
        [
            ({"hit_rate_threshold": 0.9}, {}, "gets default vectors for its misses"),
            ({"cache_refresh_percentage_per_iteration": 0.0}, {}, "the cache starts empty"),
            ({"max_get_batch_size": 1}, {}, "is read by neither parser"),
            ({"use_static_table": True}, {}, "which parser A alone reads"),
            ({"embedding_cache_type": "static"}, KAFKA, "no update reaches it"),
            ({}, KAFKA | {"volatile_db": {"type": "hash_map", "num_partitions": 8}}, "matches no update of rank_embeddings"),
            ({}, {"volatile_db": {"num_partitions": 8}, "persistent_db": ROCKS}, "which disables it. Expected the kind"),
            ({}, {"persistent_db": {"type": "rocks_db"}}, "in the folder for temporary files"),
        ],
    )
    def test_what_is_passed_over_in_silence(self, repository, changes, top, fact):
        (repository / "ps.json").write_text(json.dumps(load_json(repository / "ps.json") | top))
        edit_ps(repository, **changes)
        assert any(fact in f"{f.fact} {f.remedy}" for f in check_repository(repository) if f.level == "warning")

    def test_of_several_redis_nodes_hps_asks_the_first(self, repository):
        redis = {"type": "redis_cluster", "address": "a:7000,b:7000", "num_partitions": 8, "update_filters": [".+"]}
        (repository / "ps.json").write_text(json.dumps(load_json(repository / "ps.json") | {"volatile_db": redis}))
        (finding,) = check_repository(repository)
        assert (finding.level, finding.where) == ("warning", "ps.json")
        assert "is a:7000,b:7000; HPS asks the first only" in finding.fact

    def test_models_that_hps_would_load_as_well(self, repository):
        document = load_json(repository / "ps.json")
        document["models"].append(document["models"][0] | {"model": "another"})
        (repository / "ps.json").write_text(json.dumps(document))
        warnings = [finding.fact for finding in check_repository(repository) if finding.level == "warning"]
        assert any("names the models another, which are not in this repository" in fact for fact in warnings)

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


class TestRows:
    """The bytes of the sparse folder."""

    @pytest.fixture
    def folder(self, repository):
        (folder,) = (repository / EMBEDDINGS / "1").glob("rank-*.model")
        return folder

    @pytest.mark.parametrize(
        ("file", "dtype", "change", "fact"),
        [
            ("key", "<i8", lambda a: a.__setitem__(1, -1), "has key -1. HPS reserves"),
            ("key", "<i8", lambda a: a.__setitem__(1, 2**63 - 1), "has key 9223372036854775807. HPS reserves"),
            ("key", "<i8", lambda a: a.__setitem__(1, a[0]), "occurs more than once"),
            ("emb_vector", "<f4", lambda a: a.__setitem__(40, np.nan), "Row 2 of /models/rank_embeddings/1/rank-"),
            ("emb_vector", "<f4", lambda a: a.__setitem__(-1, np.inf), "is not finite; expected numbers"),
        ],
    )
    def test_broken_rules(self, repository, folder, file, dtype, change, fact):
        values = np.fromfile(folder / file, dtype)
        change(values)
        values.tofile(folder / file)
        reseal(repository, EMBEDDINGS)
        assert fact in errors(repository)

    @pytest.mark.parametrize(("file", "fact"), [("key", "The files were cut or belong"), ("emb_vector", "The files were cut")])
    def test_cut_files(self, repository, folder, file, fact):
        (folder / file).write_bytes((folder / file).read_bytes()[:-4])
        reseal(repository, EMBEDDINGS)
        assert fact in errors(repository)

    @pytest.mark.parametrize("order", ["coldest first", "by number"])
    def test_keys_in_another_order_than_they_are_asked_for(self, repository, folder, order):
        """Every answer is right, and the GPU cache is filled with rows that nobody wants."""
        keys = np.fromfile(folder / "key", "<i8")
        vectors = np.fromfile(folder / "emb_vector", "<f4").reshape(len(keys), -1)
        at = np.arange(len(keys))[::-1] if order == "coldest first" else np.argsort(keys)
        keys[at].tofile(folder / "key")
        vectors[at].tofile(folder / "emb_vector")
        reseal(repository, EMBEDDINGS)
        (finding,) = check_repository(repository)
        assert (finding.level, finding.where) == ("warning", f"{EMBEDDINGS}/1")
        assert "the GPU cache is filled from the start of the file, expected hottest first" in finding.fact


class TestWiring:
    """KEYS and NUMKEYS on their way to the backend."""

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
                "rank_features makes KEYS and is not KIND_CPU",
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
        assert "KEYS of rank_embeddings is fed by NUMKEYS; expected what a step gives as KEYS" in errors(repository)


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

    def test_a_step_that_is_no_model(self, repository):
        edit(repository, "rank", lambda c: setattr(c.ensemble_scheduling.step[3], "model_name", "gone"))
        assert "rank/config.pbtxt: Step gone is no model of this repository; expected one of preprocess, " in errors(repository)

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
