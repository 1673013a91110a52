"""`make check` on the files that HPS reads: its model, ps.json and the sparse folder. Each broken rule yields a finding."""

import json

import numpy as np
import pytest
from tritonclient.grpc import model_config_pb2 as pb

from export.check import check_repository
from hps_config.parsers import load_json
from perf.tune.variant import seal_again
from tests.long.merlin.breaking import EMBEDDINGS, edit, edit_ps, errors


class TestHpsModel:
    """Each rule the backend has for config.pbtxt."""

    @pytest.mark.parametrize(
        ("change", "fact"),
        [
            (lambda c: setattr(c.input[0], "data_type", pb.TYPE_INT32), "the backend takes KEYS TYPE_INT64"),
            (lambda c: setattr(c.input[1], "name", "COUNTS"), "the backend takes KEYS TYPE_INT64 and NUMKEYS"),
            (lambda c: c.input.pop(), "the backend takes KEYS TYPE_INT64 and NUMKEYS"),
            (lambda c: setattr(c.output[0], "data_type", pb.TYPE_FP16), "Its outputs are not one tensor of TYPE_FP32"),
            (lambda c: c.output.add(name="MORE", data_type=pb.TYPE_FP32, dims=[-1]), "Its outputs are not one tensor"),
            (lambda c: setattr(c.output[0], "name", "ROWS"), "Its output is not called OUTPUT0"),
            (lambda c: c.input[0].dims.__setitem__(0, 1), "the backend requires -1 as the first"),
            (lambda c: c.input[0].dims.pop(), "do not arrive with two axes"),
            (lambda c: c.dynamic_batching.SetInParent(), "dynamic_batching: rows of several requests"),
            (lambda c: c.instance_group.pop(), "There is no instance_group"),
            (lambda c: setattr(c.instance_group[0], "kind", pb.ModelInstanceGroup.KIND_CPU), "is not KIND_GPU with gpus"),
            (lambda c: c.instance_group[0].gpus.append(3), "deployed_device_list of ps.json lacks"),
            (lambda c: c.instance_group[0].gpus.append(3), "all instances would use the last one"),
            (lambda c: setattr(c.instance_group[0], "count", 3), "3 instances share 2 worker buffers"),
            (lambda c: setattr(c.parameters["refresh_interval"], "string_value", "0.5"), "backend reads whole seconds only"),
            (lambda c: setattr(c.parameters["refresh_interval"], "string_value", "-1"), "backend reads whole seconds only"),
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

    def test_a_refresh_beyond_its_buffers(self, repository):
        edit(repository, EMBEDDINGS, lambda c: setattr(c.parameters["refresh_interval"], "string_value", "5"))
        assert errors(repository) == ""
        edit_ps(repository, cache_refresh_percentage_per_iteration=0.55)
        assert "a refresh would write beyond its buffers" in errors(repository)
        edit(repository, EMBEDDINGS, lambda c: setattr(c.parameters["refresh_interval"], "string_value", "0"))
        assert errors(repository) == ""

    def test_updates_that_the_gpu_never_sees(self, repository):
        document = load_json(repository / "ps.json") | {"update_source": {"type": "kafka", "brokers": "kafka:9092"}}
        (repository / "ps.json").write_text(json.dumps(document))
        warnings = [finding.fact for finding in check_repository(repository) if finding.level == "warning"]
        assert any("a row that the GPU has cached never changes" in fact for fact in warnings)
        edit(repository, EMBEDDINGS, lambda c: setattr(c.parameters["refresh_interval"], "string_value", "5"))
        assert check_repository(repository) == []


class TestPsJson:
    """Rules between ps.json and the repository. Those of ps.json alone are in tests/unit/hps, and some of them here."""

    @pytest.mark.parametrize(
        ("changes", "fact"),
        [
            ({"model": "rank"}, "names no model 'rank_embeddings'"),
            ({"max_batch_size": 8}, "max_batch_size of ps.json is 8; callers may send 64"),
            ({"maxnum_catfeature_query_per_table_per_sample": [5]}, "counts 5 keys per sample"),
            ({"sparse_files": ["/elsewhere/rank.model"]}, "outside of /models"),
            ({"sparse_files": ["/models/rank_embeddings/1/none.model"]}, "is missing or empty"),
            ({"row_format_per_table": ["int8"]}, "HPS serves fp32 in any case"),
            (
                {"deployed_device_list": [0, 1]},
                "deployed_device_list of ps.json ends with GPU 1, where all instances would run",
            ),
            ({"deployed_device_list": [1]}, "It runs on the GPUs [0], which deployed_device_list of ps.json lacks"),
            ({"refresh_interval": 5}, "refresh_interval of ps.json is 5; the backend goes by that of config.pbtxt, 0"),
        ],
    )
    def test_broken_rules(self, repository, changes, fact):
        edit_ps(repository, **changes)
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

    def test_of_several_redis_nodes_hps_asks_the_first(self, repository):
        redis = {"type": "redis_cluster", "address": "a:7000,b:7000", "num_partitions": 8, "update_filters": [".+"]}
        (repository / "ps.json").write_text(json.dumps(load_json(repository / "ps.json") | {"volatile_db": redis}))
        (finding,) = check_repository(repository)
        assert (finding.level, finding.where) == ("warning", "ps.json")
        assert "is a:7000,b:7000; HPS asks only the first node" in finding.fact

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
        seal_again(repository, 1, EMBEDDINGS)
        assert "rank_features sends keys up to" in errors(repository)
        (keys[kept] + 1).tofile(folder / "key")
        seal_again(repository, 1, EMBEDDINGS)
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
            ("emb_vector", "<f4", lambda a: a.__setitem__(0, np.nan), "Row 0 of /models/rank_embeddings/1/rank-"),
            ("emb_vector", "<f4", lambda a: a.__setitem__(-1, np.inf), "is not finite; expected numbers"),
        ],
    )
    def test_broken_rules(self, repository, folder, file, dtype, change, fact):
        values = np.fromfile(folder / file, dtype)
        change(values)
        values.tofile(folder / file)
        seal_again(repository, 1, EMBEDDINGS)
        assert fact in errors(repository)

    @pytest.mark.parametrize("order", ["coldest first", "by number"])
    def test_keys_in_another_order_than_they_are_asked_for(self, repository, folder, order):
        """Every answer is right, but the GPU cache is filled with rows that are not the most used."""
        keys = np.fromfile(folder / "key", "<i8")
        vectors = np.fromfile(folder / "emb_vector", "<f4").reshape(len(keys), -1)
        at = np.arange(len(keys))[::-1] if order == "coldest first" else np.argsort(keys)
        keys[at].tofile(folder / "key")
        vectors[at].tofile(folder / "emb_vector")
        seal_again(repository, 1, EMBEDDINGS)
        (finding,) = check_repository(repository)
        assert (finding.level, finding.where) == ("warning", f"{EMBEDDINGS}/1")
        assert "the GPU cache is filled from the start of the file, expected hottest first" in finding.fact
