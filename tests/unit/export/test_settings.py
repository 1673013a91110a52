"""The export's settings: defaults, overrides by model, and messages that name the key."""

from pathlib import Path

import pytest

from export.settings import PipelineSettings, Settings, read_exported_settings, read_settings
from export.settings_doc import DOCUMENT, compose_settings_doc
from export.steps.training_settings import (
    choose_ranking_settings,
    choose_sequence_settings,
    explain_no_graph,
    explain_no_sequence,
    find_cluster,
)
from serving.contract.errors import ArtifactError, ConfigError
from serving.contract.tensors import ENSEMBLE, LIVE_MODELS, STAGES
from serving.stages.features.ids import MOST_NEWCOMERS
from training.features.cluster import Cluster


def read(tmp_path, text):
    path = tmp_path / "export.toml"
    path.write_text(text)
    return read_settings(path)


def test_a_mistyped_rule_is_refused_when_the_settings_are_read(tmp_path):
    with pytest.raises(ConfigError, match=r"rules has no setting 'diversty'; expected one of blocked_items, .*diversity"):
        read(tmp_path, "[rules]\ndiversty = 0.2\n")


def test_nothing_waits_by_default():
    serving = read_settings(None).merge_serving()
    assert serving.keys() == {*STAGES, *LIVE_MODELS, ENSEMBLE}
    assert {serving[name].queue_delay_us for name in serving} == {0}


def test_a_section_per_model_overrides_the_common_one(tmp_path):
    settings = read(tmp_path, "[serving]\nmax_batch_size = 32\nqueue_delay_us = 7\n[serving.rank]\ninstances = 2\n")
    serving = settings.merge_serving()
    assert serving["rank"].instances == 2
    assert serving["rank"].max_batch_size == 32
    assert serving["rerank"].instances == 1
    assert {serving[name].queue_delay_us for name in STAGES} == {7}


@pytest.mark.parametrize(
    ("serving", "preferred"),
    [
        ({}, (16,)),
        ({"recommend": {"instances": 3}}, (16,)),
        ({"recommend": {"preferred_batch_sizes": []}}, ()),
        ({"preferred_batch_sizes": [4]}, (4,)),
    ],
)
def test_processes_of_the_fused_layout_leave_each_other_some_of_the_queue(serving, preferred):
    found = Settings(serving=serving).merge_serving()
    assert found[ENSEMBLE].preferred_batch_sizes == preferred
    assert {found[name].preferred_batch_sizes for name in STAGES} == {tuple(serving.get("preferred_batch_sizes", ()))}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "[pipeline]\ncandidats = 3",
            r"\[pipeline\] has the unknown key 'candidats'\. Did you mean 'candidates'",
        ),
        (
            "[pipline]\ncandidates = 3",
            r"There is no section or key 'pipline'\. Did you mean 'pipeline'\? Allowed: pipel",
        ),
        ("[merlin]\nzzz = 3", r"\[merlin\] has the unknown key 'zzz'\. Allowed: triton, mount"),
        ("[pipeline]\ncandidates = 0", "candidates"),
        ("[pipeline]\nhistory = 100_000_000", "history: .*less than or equal to 10000"),
        ("[pipeline]\nrecorded_requests = 10_000_000", "recorded_requests: .*less than or equal to 100000"),
        ("[ranker]\nwidth = 1_000_000", "ranker.width: .*less than or equal to 1024"),
        ("[pipeline]\nseed = -1", "seed: .*greater than or equal to 0, got -1"),
        ("[pipeline]\nseed = 4_294_967_296", "seed: .*less than or equal to 4294967295"),
        ("[serving]\ninstanses = 3", "unknown key 'instanses'. Did you mean 'instances'"),
        ("[serving.rank]\ninstances = '2'", r"\[serving.rank\] instances is '2'"),
        (
            "[serving.rank]\ninstances = 0",
            r"\[serving.rank\] instances is 0\. Expected a whole number from 1 to 256; the default is 1\.$",
        ),
        ("[serving]\ninstances = 257", "instances is 257. Expected a whole number from 1 to 256"),
        (
            "[serving]\nmax_batch_size = 0",
            "max_batch_size is 0. Expected .* from 1 to 2147483647; the default is 64",
        ),
        (
            "[serving.rank]\nqueue_length = 4_294_967_296",
            "queue_length is 4294967296. Expected .* from 0 to 2147483647",
        ),
        ("[compute]\nrank_threads = 1_000_000", "compute.rank_threads: .*less than or equal to 1024"),
        ("[tables]\nredis = 'cache'", "tables.redis: the Redis address is 'cache'. Expected host:port"),
        ("[tables]\nredis = 'a:7000,b:99999'", "the Redis address is 'a:7000,b:99999'"),
        ("[live]\nredis = 'cache'", "live.redis: the Redis address is 'cache'. Expected host:port"),
        ("[live]\nstore_bytes = 0", "live.store_bytes: 0 bytes are full after a few events. Expected 16 MiB or more"),
        ("[live]\nstore_bytes = '1 KiB'", "live.store_bytes: 1,024 bytes are full"),
        ("[live]\nstore_bytes = '65 TiB'", "live.store_bytes: no process can map .* Expected 64 TiB or less"),
        ("[live]\nnew_items = 1_000_000_000", "live.new_items: .*less than or equal to 10000000"),
        ("[live]\nbrokers = 'x'", "live.brokers: 'x' is no address. Expected host:port"),
        ("[tables]\nbrokers = 'a:9092,b'", "tables.brokers: 'b' is no address"),
        (
            "[live]\nnew_item_place = 50\n[pipeline]\nitems_returned = 1",
            "new_item_place is 50. Expected 0 to 0, because .* items_returned is 1",
        ),
        ("[live]\nnew_item_place = 20", "Expected 0 to 19"),
        ("[serving]\npreferred_batch_sizes = [128]", r"\[serving\] preferred_batch_sizes is \[128\], .* which is 64"),
        ("[serving.rank]\npreferred_batch_sizes = [16]\nmax_batch_size = 8", r"\[serving.rank\] .* which is 8"),
        ("[live]\ntopic = ' '", "live.topic: ' ' names nothing. Write a name"),
        ("[serving]\npreferred_batch_sizes = [0]", "preferred_batch_sizes"),
        ("[serving]\nrank = 2", r"export\.toml: serving\.rank is 2\. Expected a section: \[serving\.rank\]"),
        ("[training]\nminutes = '3'", r"training\.minutes: Input should be a valid number, got '3'; docs/settings\.md lists"),
        ("[training]\nminutes = nan", r"training\.minutes: .*, got nan"),
        ("[live]\ncontinue_log = 'no'", r"live\.continue_log: Input should be a valid boolean, got 'no'"),
        ("[merlin]\ngpu = '1'", r"merlin\.gpu: Input should be a valid integer, got '1'"),
        ("[pipeline", "not valid TOML"),
        ("[ranker]\ncompression = 'tiny'", "ranker.compression: .*'none', 'distilled', 'pruned' or 'int8'"),
        ("[ranker]\ndistilled = true", r"\[ranker\] has the unknown key 'distilled'.*Allowed: compression, width"),
        ("[ranker]\ncompression = 'int8'\n[hugectr]\nmodel = 'dlrm'", "HugeCTR's, which is served as it is"),
        ("[dask]\nscheduler = 'host:8786'\nfolder = '/shared'", "scheduler is 'host:8786'. Expected an address like tcp:"),
        ("[dask]\nscheduler = 'tcp://host:8786'", "folder is '', but scheduler is set. Name a folder"),
        ("[dask]\nscheduler = 'tcp://host:8786'\nfolder = 'shared'", "folder is 'shared', but scheduler is set"),
    ],
)
def test_mistakes_are_named(tmp_path, text, message):
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, text)


@pytest.mark.parametrize(
    "text",
    [
        "[pipeline]\nitems_returned = 5",
        "[serving]\nmax_batch_size = 8",
        "[live]\nbrokers = 'kafka-1:9092, [::1]:9092'",
    ],
    ids=["lists shorter than the default place of new items", "batches smaller than the fused layout prefers", "two brokers"],
)
def test_settings_that_work_are_read(tmp_path, text):
    settings = read(tmp_path, text)
    assert Settings.model_validate(settings.model_dump(mode="json")) == settings


def test_a_cluster_is_used_only_when_it_is_named(tmp_path):
    assert find_cluster(read_settings(None).dask) is None
    settings = read(tmp_path, "[dask]\nscheduler = 'tcp://host:8786'\nfolder = '/shared'")
    assert find_cluster(settings.dask) == Cluster("tcp://host:8786", Path("/shared"))


def test_a_file_that_is_no_text_is_named(tmp_path):
    (tmp_path / "settings.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"settings\.toml is not valid TOML: .*utf-8.*Save the file as UTF-8"):
        read_settings(tmp_path / "settings.toml")


def test_a_file_with_a_byte_order_mark_is_read(tmp_path):
    """Editors of Windows write one, and a message about line 1 would show nothing to correct."""
    (tmp_path / "settings.toml").write_bytes(b"\xef\xbb\xbf[ranker]\n")
    assert read_settings(tmp_path / "settings.toml") == read_settings(None)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere.toml cannot be read"):
        read_settings(tmp_path / "nowhere.toml")


@pytest.mark.parametrize(
    ("changes", "n_positives", "tried"),
    [
        ({}, 10_000, False),
        ({}, 100_000, True),
        ({}, 400_000, False),
        ({"training": {"minutes": 15.0}}, 400_000, True),
        ({"training": {"sequence": "never"}}, 100_000, False),
        ({"pipeline": {"history": 1}}, 100_000, False),
    ],
)
def test_a_sequence_model_is_tried_where_log_and_time_suffice(changes, n_positives, tried):
    assert (choose_sequence_settings(Settings.model_validate(changes), n_positives) is not None) == tried


@pytest.mark.parametrize(
    ("explain", "changes", "n_positives", "why"),
    [
        (explain_no_sequence, {}, 100_000, ""),
        (explain_no_sequence, {}, 10_000, "10,000 positive events; it needs 20,000"),
        (explain_no_sequence, {}, 396_374, "396,374 positive events need [training] minutes = 12"),
        (explain_no_sequence, {"training": {"minutes": 12.0}}, 396_374, ""),
        (explain_no_sequence, {"training": {"sequence": "never"}}, 100_000, '[training] sequence = "never"'),
        (explain_no_sequence, {"pipeline": {"history": 1}}, 100_000, "it needs [pipeline] history = 2 at least, not 1"),
        (explain_no_graph, {}, 3_000_000, ""),
        (explain_no_graph, {}, 3_000_001, "3,000,001 positive events need [training] minutes = 7"),
        (explain_no_graph, {"training": {"graph": "never"}}, 100_000, '[training] graph = "never"'),
    ],
)
def test_a_model_that_is_not_tried_has_a_reason(explain, changes, n_positives, why):
    assert explain(Settings.model_validate(changes), n_positives) == why


def test_a_sequence_model_reads_no_more_than_histories_hold():
    for history, length in ((8, 8), (500, 50)):
        chosen = choose_sequence_settings(Settings.model_validate({"pipeline": {"history": history}}), 100_000)
        assert chosen is not None
        assert chosen.shape.length == length


def test_settings_survive_the_manifest():
    settings = Settings(serving={"rank": {"instances": 2}})
    assert Settings.model_validate(settings.model_dump()) == settings


def test_the_settings_reference_is_current():
    assert DOCUMENT.read_text() == compose_settings_doc(), "docs/settings.md is out of date: make docs"


def test_the_settings_reference_lists_every_key_with_its_default():
    document = compose_settings_doc()
    for section, field in Settings.model_fields.items():
        assert f"## [{section}]" in document
        for key in getattr(field.annotation, "model_fields", {}):
            assert f"| `{key}` |" in document
    assert '| `l1` | bytes | `"64 MiB"` |' in document


def test_new_items_in_the_re_ranked_list_take_no_place_of_an_answer_however_long_it_is():
    lengths = {}
    for sizes in ((256, 20), (60, 20), (256, 100), (100, 100)):
        pipeline = PipelineSettings(candidates=sizes[0], items_returned=sizes[1])
        lengths[sizes] = choose_ranking_settings(Settings(pipeline=pipeline)).reranker.list_length
    assert lengths == {(256, 20): 100, (60, 20): 60, (256, 100): 100 + MOST_NEWCOMERS, (100, 100): 100}


def test_settings_of_a_generation_that_another_version_exported_are_refused_with_the_remedy():
    manifest = {"settings": Settings().model_dump(mode="json")}
    assert read_exported_settings(Path("recommend/1"), manifest) == Settings()
    manifest["settings"]["ranker"]["an_old_key"] = True
    with pytest.raises(ArtifactError, match=r"recommend/1 .* ranker\.an_old_key\. Export again"):
        read_exported_settings(Path("recommend/1"), manifest)
