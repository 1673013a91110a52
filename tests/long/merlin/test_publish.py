"""A merlin export: the files that it writes, its refusals, and its proofs before it takes a repository's place."""

import shutil
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from google.protobuf.json_format import MessageToJson

from export.__main__ import app
from export.merlin_settings import MerlinSettings
from export.nvidia.graph import flatten_rows
from export.nvidia.hps import estimate_uses, name_table, write_table
from export.nvidia.parts import PYTHON, list_parts
from export.nvidia.pipeline import MerlinPipeline, map_to_host
from export.nvidia.publish import publish_merlin, refuse_long_lists, rehearse
from export.settings import Settings, with_triton
from hps_config.reader import read_ps_json
from repository.checks.recorded import RECORDED_FILE, compare_answers, read_recorded
from repository.triton.models import read_config, write_config
from serving.contract.artifacts import MANIFEST_FILE, open_network, read_json
from serving.contract.errors import ArtifactError, ConfigError, DependencyError, ExportError, RequestError
from serving.contract.tensors import Degraded, pack_records
from serving.pipeline import Pipeline
from serving.stages.features.ranking import SCALE
from serving.stages.parts.models import (
    PART_TYPES,
    RankFeatures,
    RankRows,
    RankScores,
    RerankList,
    RerankRules,
    RetrieveFeatures,
    RetrieveSearch,
)
from serving.stages.parts.specs import RANK_SCORES, RERANK_RULES, RETRIEVE_SEARCH
from serving.tables.formats.sparse_folder import read_sparse_folder
from tests.contract import fake_backend
from tests.interrupting import called_on_return
from tests.long.merlin.conftest import source_of


@pytest.fixture
def recorded(cpu):
    return read_recorded(cpu / "recommend" / "1" / RECORDED_FILE)


class TestAnswers:
    @pytest.mark.parametrize("triton", ["24.03", "modern"])
    def test_stages_in_parts_answer_like_whole_ones(self, exported, cpu, recorded, triton):
        """They are compared with the cpu profile's stages in one process."""
        whole = Pipeline.load(cpu, as_exported=True)(recorded.inputs)
        parts = MerlinPipeline(exported[triton], 1, "/models")(recorded.inputs)
        assert compare_answers(parts, whole, 1e-5) == ""
        np.testing.assert_array_equal(parts["degraded"], whole["degraded"])

    def test_a_repository_that_answers_otherwise_is_not_published(self, repository):
        (folder,) = (repository / "rank_embeddings" / "1").glob("rank-*.model")
        (-3 * np.fromfile(folder / "emb_vector", "<f4")).tofile(folder / "emb_vector")
        with pytest.raises(ExportError, match="cpu profile answer recorded requests differently"):
            rehearse(repository, 1, "/models")

    def test_a_malformed_request_names_its_fault(self, exported, recorded):
        inputs = {name: values[:1] for name, values in recorded.inputs.items()}
        with pytest.raises(RequestError, match="temperature is infinite"):
            MerlinPipeline(exported["24.03"], 1, "/models")(inputs | {"temperature": np.full((1, 1), np.inf, np.float32)})

    def test_a_repository_that_other_code_exported(self, repository):
        """Its wiring is for other tensors: loading it names them, instead of a KeyError during a request."""
        config = read_config(repository / "rank_features" / "config.pbtxt")
        config.parameters["record_user"].string_value = "user_id INT64 [1]"
        write_config(repository / "rank_features" / "config.pbtxt", config)
        with pytest.raises(ArtifactError, match="the code of this checkout state different tensors: user UINT8"):
            MerlinPipeline(repository, 1, "/models")

    def test_a_model_that_no_export_writes(self, repository):
        shutil.copytree(repository / "rank_scores", repository / "mine")
        with pytest.raises(ArtifactError, match="has the model mine, which no export writes"):
            MerlinPipeline(repository, 1, "/models")


@pytest.mark.parametrize("triton", ["24.03", "modern"])
def test_of_the_parts_of_a_stage_the_last_one_counts(exported, recorded, triton, monkeypatch):
    """Otherwise a stage in four parts would have answered four times as many requests."""
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", fake_backend)
    from serving.stages.parts.triton import make_part_model

    trace = MerlinPipeline(exported[triton], 1, "/models").trace({name: values[:3] for name, values in recorded.inputs.items()})
    counted = {}
    for part in list_parts(MerlinSettings(triton=triton)):
        if part.kind != PYTHON:
            continue
        folder = exported[triton] / part.name
        config = read_config(folder / "config.pbtxt")
        model = make_part_model(PART_TYPES[part.name])()
        model.initialize(
            {
                "model_name": part.name,
                "model_instance_name": f"{part.name}_0_0",
                "model_instance_kind": "CPU",
                "model_instance_device_id": "0",
                "model_repository": str(folder),
                "model_version": "1",
                "model_config": MessageToJson(config, preserving_proto_field_name=True),
            }
        )
        [response] = model.execute([fake_backend.InferenceRequest(**pack_records(model.spec.inputs, trace[part.name]))])
        assert not response.has_error(), response.error().message()
        counted[part.name] = (model.first.metrics.calls, model.first.metrics.rows)
        model.finalize()
    last = {RETRIEVE_SEARCH, RANK_SCORES, RERANK_RULES}
    assert counted == {name: (1, 3) if name in last else (0, 0) for name in counted}
    assert last < counted.keys()


class TestSteps:
    @pytest.mark.parametrize(
        ("part", "kind", "name", "said"),
        [
            ("retrieve_search", RetrieveSearch, "item_ids", "items, but found"),
            ("rank_features", RankFeatures, "item_ids", "rows, found"),
            ("rank_features", RankFeatures, "item_numbers", "rows, found"),
            ("retrieve_features", RetrieveFeatures, "tables/history", r"rows in history\.npy; expected 4127"),
            ("rerank_list", RerankList, "item_vectors", r"expected float32 \[4127, any\]"),
            ("rerank_rules", RerankRules, "rules_items", "items, the rules"),
        ],
    )
    def test_a_part_whose_arrays_are_of_another_catalogue_is_refused(self, repository, part, kind, name, said):
        path = repository / part / "1" / f"{name}.npy"
        np.save(path, np.load(path)[:-1])
        with pytest.raises(ArtifactError, match=said):
            kind.load(repository / part / "1")

    def test_keys_are_first_keys_plus_rows_users_first(self, exported, recorded):
        folder = exported["24.03"] / "rank_features" / "1"
        step, trace = RankFeatures.load(folder), MerlinPipeline(exported["24.03"], 1, "/models").trace(recorded.inputs)
        given = trace["rank_features"]
        keys = step(given)["KEYS"]
        first, settings = step.part.first_keys, step.inputs.settings
        row = 3
        positions = step.inputs.items.find_positions(given["candidate_ids"][row])
        expected = [given["user_categorical"][row, slot] + first[name] for slot, name in enumerate(settings.user_tables)]
        for position in positions:
            expected += [step.inputs.item_rows[position, slot] + first[name] for slot, name in enumerate(settings.item_tables)]
        assert keys[row].tolist() == expected

    def test_one_request_is_one_row_of_keys(self):
        outputs = {"KEYS": np.arange(6).reshape(2, 3), "NUMKEYS": np.full((2, 1), 3, np.int32), "other": np.zeros(2)}
        sent = RankFeatures.flatten_keys(outputs)
        assert (sent["KEYS"].tolist(), sent["NUMKEYS"].tolist()) == ([[0, 1, 2, 3, 4, 5]], [[6]])
        assert sent["NUMKEYS"].dtype == np.int32

    def test_tables_that_cannot_be_read_degrade_the_answer(self, exported, recorded):
        """Without them `rank_scores` keeps retrieval's order and says so."""
        given = MerlinPipeline(exported["modern"], 1, "/models").trace(recorded.inputs)["rank_rows"]
        step = RankRows.load(exported["modern"] / "rank_rows" / "1")

        def fail():
            raise DependencyError("the tables are down")

        with called_on_return(fail, type(step.rows).read):
            rows = step(given)
        assert np.isnan(rows["user_rows"]).all()
        assert np.isnan(rows["item_rows"]).all()
        logits = np.full(given["retrieval_scores"].shape, np.nan, np.float32)
        scores = RankScores.load(exported["modern"] / "rank_scores" / "1")(given | rows | {"logits": logits})
        with_items = (given["candidate_ids"] >= 0).any(axis=1)
        assert (scores["lineage"][with_items, 1] & Degraded.RANK).all()
        np.testing.assert_array_equal(scores["rank_scores"][with_items, 0], given["retrieval_scores"][with_items, 0])

    def test_the_tiers_are_measured_and_left(self, exported, recorded):
        given = MerlinPipeline(exported["modern"], 1, "/models").trace(recorded.inputs)["rank_rows"]
        step = RankRows.load(exported["modern"] / "rank_rows" / "1")
        before = {(m.name, str(m.labels)): m.value for m in step.list_measurements()}
        step(given)
        after = {(m.name, str(m.labels)): m.value for m in step.list_measurements()}
        assert any(after[key] > before.get(key, 0) for key in after)
        step.close()


class TestHpsFiles:
    def test_ps_json_names_the_table_where_the_container_sees_it(self, exported, cpu):
        name = name_table(source_of(cpu).load_tables())
        params = read_ps_json(exported["24.03"] / "ps.json").find_model("rank_embeddings")
        assert params.sparse_files == (f"/models/rank_embeddings/1/{name}.model",)
        assert params.embedding_table_names == (name,)
        assert not (exported["modern"] / "ps.json").exists()

    def test_the_table_holds_every_row_of_every_slot(self, exported, cpu):
        tables = source_of(cpu).load_tables()
        width = next(iter(tables.values())).shape[1]
        found = read_sparse_folder(exported["24.03"] / "rank_embeddings" / "1" / f"{name_table(tables)}.model", width)
        order = np.argsort(found.keys)
        np.testing.assert_array_equal(found.vectors[order], np.concatenate(list(tables.values())))

    def test_tables_of_two_exports_never_share_a_name(self):
        """HPS keeps rows under it, in a Redis cluster or RocksDB that outlive a server."""
        tables = {"user_0": np.zeros((3, 2), np.float32), "item_0": np.ones((4, 2), np.float32)}
        more_users = tables | {"user_0": np.zeros((4, 2), np.float32)}
        retrained = tables | {"item_0": np.full((4, 2), 1.5, np.float32)}
        assert len({name_table(own) for own in (tables, more_users, retrained)}) == 3
        assert name_table(tables) == name_table(dict(tables))

    def test_what_is_used_most_comes_first(self, tmp_path):
        tables = {"user_0": np.zeros((3, 2), np.float32), "item_0": np.ones((4, 2), np.float32)}
        popularity = np.log1p(np.array([1.0, 50.0, 3.0, 0.0], np.float32)) * SCALE  # of three items and padding
        uses = estimate_uses(tables, ("item_0",), np.array([[3], [2], [2], [0]]), popularity)
        np.testing.assert_allclose(uses["item_0"], [0, 0, 53, 1], rtol=1e-5)
        np.testing.assert_allclose(uses["user_0"], [54, 27, 18], rtol=1e-5)
        first = write_table(tmp_path, tables, uses)
        assert first == {"user_0": 0, "item_0": 3}
        keys = read_sparse_folder(tmp_path / f"{name_table(tables)}.model", 2).keys
        assert keys.tolist() == [0, 5, 1, 2, 6, 3, 4]

    def test_a_path_outside_of_the_mount(self):
        assert map_to_host(Path("/here"), "/models", "/models/a/b") == Path("/here/a/b")
        with pytest.raises(ArtifactError, match="names /other/a, outside of /models"):
            map_to_host(Path("/here"), "/models", "/other/a")


class TestNetwork:
    def test_flat_rows_give_the_same_logits(self, cpu, exported, recorded):
        given = MerlinPipeline(exported["modern"], 1, "/models").trace(recorded.inputs)["rank_dense"]
        batch = len(given["user_rows"])
        flat = np.concatenate([given[name].reshape(batch, -1) for name in ("user_rows", "item_rows")], axis=1)
        feeds = {name: given[name] for name in ("user_numbers", "pair_numbers")} | {"embeddings": flat.ravel()}
        (got,) = open_network(exported["24.03"] / "rank_dense" / "1", "model").run(["logits"], feeds)
        (expected,) = open_network(cpu / "rank" / "1", "rank").run(["logits"], given)
        np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-6)

    def test_a_network_without_those_inputs(self, cpu, tmp_path):
        with pytest.raises(ExportError, match=r"lacks the inputs \['item_rows', 'user_rows'\]; it has"):
            flatten_rows(cpu / "rerank" / "1" / "rerank.onnx", tmp_path / "x.onnx", 1, 2, 1, 4)

    def test_batches_are_those_of_the_settings(self, cpu, exported, tmp_path):
        """The batcher aims at no size by default, as in the cpu profile; profiles span all sizes that it makes."""
        serving = {"preferred_batch_sizes": [4, 100], "queue_delay_us": 50, "max_batch_size": 16}
        settings = Settings.model_validate({"merlin": {"triton": "modern"}, "serving": serving})
        publish_merlin(source_of(cpu), tmp_path / "repository", settings)
        for repository, preferred, delay_us, most, tuned in (
            (exported["modern"], [], 0, 64, [1, 8, 32]),
            (tmp_path / "repository", [4], 50, 16, [1, 4]),
        ):
            for name in ("towers_user", "rank_dense", "rerank_network"):
                config = read_config(repository / name / "config.pbtxt")
                assert (config.max_batch_size, list(config.dynamic_batching.preferred_batch_size)) == (most, preferred)
                assert config.dynamic_batching.max_queue_delay_microseconds == delay_us
                profiles = read_json(repository / name / "1", "engine.json")["profiles"]
                rows = [next(iter(profile.values())) for profile in profiles]
                assert [[shape[0] for shape in span] for span in rows] == [[1, usual, most] for usual in tuned]

    def test_behind_hps_one_profile_accepts_every_batch_and_nothing_idle_is_loaded(self, exported):
        """The TensorRT backend takes each request without a batch axis for one row when it chooses a profile and a graph."""
        config = read_config(exported["24.03"] / "rank_dense" / "config.pbtxt")
        (profile,) = read_json(exported["24.03"] / "rank_dense" / "1", "engine.json")["profiles"]
        assert [[shape[0] for shape in profile[name]] for name in ("user_numbers", "pair_numbers")] == [[1, 1, 64]] * 2
        assert list(config.instance_group[0].profile) == ["0"]
        assert not config.optimization.cuda.graphs
        assert read_config(exported["24.03"] / "towers_user" / "config.pbtxt").optimization.cuda.graphs

    def test_only_the_requests_vary(self, exported):
        graph = onnx.load(str(exported["24.03"] / "rank_dense" / "1" / "model.onnx")).graph
        dims = {tensor.name: [d.dim_value or d.dim_param for d in tensor.type.tensor_type.shape.dim] for tensor in graph.input}
        assert dims["pair_numbers"][1:] == read_config(exported["24.03"] / "rank_dense" / "config.pbtxt").input[1].dims[1:]


class TestRefusals:
    def test_the_place_of_another_profile(self, cpu, tmp_path):
        other = shutil.copytree(cpu, tmp_path / "other")
        with pytest.raises(ExportError, match="holds another profile"):
            publish_merlin(source_of(cpu), other, Settings())
        assert read_config(other / "rank" / "config.pbtxt").backend == "python"

    def test_more_candidates_than_a_gpu_index_gives(self, cpu):
        from dataclasses import replace

        source = source_of(cpu)
        info = source.info["retrieve"]
        long = replace(info, axes=replace(info.axes, candidates=2_049))
        with pytest.raises(ConfigError, match=r"candidates is 2049; Faiss gives at most 2048"):
            refuse_long_lists(replace(source, info={**source.info, "retrieve": long}))

    def test_a_triton_nobody_has(self):
        assert with_triton(Settings(), "modern").merlin.triton == "modern"
        assert with_triton(Settings(), "") == Settings()
        with pytest.raises(ConfigError, match=r"TRITON is '9'\. Expected 24\.03"):
            with_triton(Settings(), "9")

    def test_the_fused_layout(self, capsys):
        from typer.testing import CliRunner

        result = CliRunner().invoke(app, ["build", "--profile", "merlin", "--layout", "fused"])
        assert "has no fused layout" in str(result.exception)

    def test_a_second_export_replaces_the_first(self, cpu, repository):
        (repository / "stray").touch()
        beside = set(repository.parent.iterdir())
        publish_merlin(source_of(cpu), repository, Settings.model_validate({"merlin": {"triton": "modern"}}))
        assert not (repository / "stray").exists()
        assert not (repository / "rank_embeddings").exists()
        facts = read_json(repository / "recommend" / "1", MANIFEST_FILE)
        assert (facts["profile"], facts["merlin"]["triton"]) == ("merlin", "modern")
        assert set(repository.parent.iterdir()) == beside

    def test_a_link_to_a_repository_stays_one(self, cpu, tmp_path):
        (tmp_path / "disk").mkdir()
        link = tmp_path / "link"
        link.symlink_to(tmp_path / "disk" / "repository")
        for _ in range(2):
            publish_merlin(source_of(cpu), link, Settings.model_validate({"merlin": {"triton": "modern"}}))
            assert link.is_symlink()
            assert [path.name for path in (tmp_path / "disk").iterdir()] == ["repository"]
        assert sorted(path.name for path in tmp_path.iterdir()) == ["disk", "link"]
