"""Reading a repository, the memory it will need, and which generation it serves: all without a server."""

import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from repository.generations import list_published_generations, pin, write_pins
from repository.lock import LOCK_FILE, hold_publication_lock
from repository.triton.models import check_backends, read_config, read_repository
from server import launcher
from server.control import find_held_generations
from server.generations import activation
from server.generations.activation import activate, publish_nothing
from server.start.memory import INSTANCE_BYTES, INSTANCE_SHM_BYTES, MiB, check_memory, estimate_need, measure_available_bytes
from server.start.ports import Ports, find_free_ports
from server.state import ServerState
from serving.contract.artifacts import write_manifest
from serving.contract.errors import ArtifactError, ConfigError, ServerError
from serving.contract.generations import read_pinned_generation
from tests.clocks import PatientClock
from tests.repositories import copy_lean_repository
from tests.server.support import toys
from tests.tags import draw_tag, run_tagged
from tests.triton_double import TritonDouble


@pytest.fixture
def repo(tmp_path):
    return toys.publish(tmp_path / "repo", 1)


def test_models_for_another_server(repo):
    check_backends(read_repository(repo))
    path = repo / "second" / "config.pbtxt"
    path.write_text(path.read_text().replace('backend: "python"', 'backend: "hps"'))
    with pytest.raises(ConfigError, match=r"models second need the backends hps, .* Serve this repository in NVIDIA's"):
        check_backends(read_repository(repo))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b'name: "first" colour: "blue"', "is not a model configuration.*colour"),
        (b'name: "first\xff"', "is not a model configuration.*invalid start byte"),
        (b"", r"names no backend; .* Copy the repository again"),
    ],
)
def test_a_config_that_is_none_or_was_cut_short_is_named(repo, content, said):
    path = repo / "first" / "config.pbtxt"
    path.write_bytes(content)
    with pytest.raises(ArtifactError, match=rf"{path} {said}"):
        check_backends(read_repository(repo))


def test_a_model_without_a_config_is_named(repo):
    with pytest.raises(ArtifactError, match="is missing; every folder in a repository is a model and needs one"):
        read_config(repo / "nothing" / "config.pbtxt")


def test_models_configs_and_versions(repo):
    toys.publish(repo, 10)
    models = {model.name: model for model in read_repository(repo)}
    assert sorted(models) == ["first", "recommend", "second"]
    assert models["first"].versions_on_disk == (1, 10)  # numbers, not names: 10 comes after 9
    assert models["first"].versions_loaded == (1,)
    assert [model.is_ensemble for model in models.values()] == [False, True, False]
    assert [model.instances for model in models.values()] == [1, 0, 1]


@pytest.mark.parametrize(
    ("policy", "loaded"), [("", (10,)), ("latest { num_versions: 2 }", (2, 10)), ("all { }", (1, 2, 10)), ("latest { }", (10,))]
)
def test_version_policies(repo, policy, loaded):
    toys.publish(repo, 2)
    toys.publish(repo, 10)
    config = repo / "first" / "config.pbtxt"
    text = config.read_text()
    config.write_text(text[: text.index("version_policy")] + (f"version_policy {{ {policy} }}" if policy else ""))
    assert read_repository(repo)[0].versions_loaded == loaded


def test_no_repository_and_an_empty_one(tmp_path):
    with pytest.raises(ConfigError, match=r"There is no model repository at .*/absent"):
        read_repository(tmp_path / "absent")
    with pytest.raises(ConfigError, match="holds no model"):
        read_repository(tmp_path)


@pytest.mark.parametrize("name", ["two words", "café", "a'b", "a$b", "a(b", "a;b", "a*b"])
def test_a_path_that_no_model_starts_from(tmp_path, name):
    repo = toys.publish(tmp_path / name / "repo", 1)
    with pytest.raises(ConfigError, match=r"and no model starts from there. Expected a path of .* Move the folder"):
        read_repository(repo)
    (tmp_path / "plain").symlink_to(repo)
    with pytest.raises(ConfigError, match="no model starts from there"):
        read_repository(tmp_path / "plain")
    with pytest.raises(ConfigError, match="no model starts from there"):
        launcher.TritonServer(toys.publish(tmp_path / "repo", 1), run_dir=tmp_path / name / "run").start()


def test_a_server_does_not_start_on_files_that_were_changed_with_their_manifest(tmp_path):
    repo = copy_lean_repository(tmp_path / "repo")
    folder = repo / "rank" / "1"
    (folder / "manifest.json").chmod(0o644)
    (folder / "stage.json").chmod(0o644)
    (folder / "stage.json").write_text((folder / "stage.json").read_text() + "\n")
    write_manifest(folder, stage="rank", generation=1)
    with pytest.raises(ArtifactError, match=r"rank/1/manifest\.json is not the manifest that generation 1 was published with"):
        launcher.TritonServer(repo, run_dir=tmp_path / "run").start()


def test_odd_characters_that_models_do_start_from(tmp_path):
    assert read_repository(toys.publish(tmp_path / "_.@%+=:,~#-" / "repo", 1))


def test_model_without_a_version_to_load(repo):
    (repo / "first" / "1").rename(repo / "first" / "4")
    with pytest.raises(ArtifactError, match=r"Model first has no version to load: \[4\] on disk"):
        read_repository(repo)


def test_memory_counts_arrays_once_and_other_files_per_instance(repo):
    folder = repo / "first" / "1"
    (folder / "vectors.npy").write_bytes(bytes(5 * MiB))
    (folder / "network.onnx").write_bytes(bytes(3 * MiB))
    config = repo / "first" / "config.pbtxt"
    one = estimate_need(read_repository(repo))
    config.write_text(config.read_text().replace("count: 1", "count: 4"))
    four = estimate_need(read_repository(repo))
    python_bytes = (folder / "model.py").stat().st_size
    assert four.ram - one.ram == 3 * (INSTANCE_BYTES + 3 * MiB + python_bytes)
    assert (one.instances, four.instances) == (2, 5)
    assert four.shm == 5 * INSTANCE_SHM_BYTES


def test_too_little_memory_is_refused(repo):
    models = read_repository(repo)
    need = estimate_need(models)
    assert check_memory(models, need.ram, need.shm) == need
    with pytest.raises(ServerError, match=r"needs about 500 MiB of memory \(2 model instances\), and 499 MiB are available"):
        check_memory(models, 499 * MiB, need.shm)
    with pytest.raises(ServerError, match=r"/dev/shm has 3 MiB free, and 2 model instances need about 4 MiB.*shm-size"):
        check_memory(models, need.ram, 3 * MiB)


@pytest.mark.parametrize(
    ("limit", "used", "stat", "field"),
    [
        ("memory.max", "memory.current", "memory.stat", "inactive_file"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_inactive_file"),
    ],
    ids=["cgroup v2", "cgroup v1"],
)
def test_a_container_limit_counts_and_the_page_cache_does_not(tmp_path, limit, used, stat, field):
    (tmp_path / "memory").mkdir()
    (tmp_path / limit).write_text("1000\n")
    (tmp_path / used).write_text("900\n")
    (tmp_path / stat).write_text(f"anon 300\nactive_file 100\n{field} 500\n")
    assert measure_available_bytes(tmp_path) == 600
    (tmp_path / used).write_text("2000\n")  # over the limit, as it can be for a moment
    assert measure_available_bytes(tmp_path) == 0


def test_without_a_container_limit_the_machine_counts(tmp_path):
    assert measure_available_bytes(tmp_path) > 600
    for name, text in {"memory.max": "max\n", "memory.current": "900\n", "memory.stat": ""}.items():
        (tmp_path / name).write_text(text)
    assert measure_available_bytes(tmp_path) > 600


def test_pinning_changes_only_which_version_answers(repo):
    toys.publish(repo, 2)
    before = {model.name: model.config for model in read_repository(repo)}
    write_pins(repo, 2, keep=(1,))
    assert read_pinned_generation(repo) == 2
    after = {model.name: model for model in read_repository(repo)}
    assert after["first"].versions_loaded == after["second"].versions_loaded == (1, 2)
    assert after["recommend"].versions_loaded == (2,)
    pin(repo, 1)
    assert {model.name: model.config for model in read_repository(repo)} == before


def test_a_generation_counts_when_every_model_has_it(repo):
    toys.publish(repo, 2)
    toys.publish(repo, 3)
    shutil.rmtree(repo / "recommend" / "3")
    assert list_published_generations(repo) == (1, 2)
    for move in (partial(activate, "localhost:1"), pin):
        with pytest.raises(ConfigError, match=r"Generation 3 is not in .*which holds \[1, 2\]"):
            move(repo, 3)
    assert read_pinned_generation(repo) == 1


def test_steps_that_disagree_and_steps_that_are_missing(repo):
    config = repo / "recommend" / "config.pbtxt"
    config.write_text(config.read_text().replace("model_version: 1", "model_version: 2", 1))
    with pytest.raises(ArtifactError, match=r"pinned to versions \[1, 2\]; expected one .*export pin"):
        read_pinned_generation(repo)
    shutil.rmtree(repo / "second")
    with pytest.raises(ConfigError, match=r"recommend has steps \['second'\], which are not in the repository"):
        list_published_generations(repo)


def test_a_repository_without_the_ensemble(repo):
    shutil.rmtree(repo / "recommend")
    with pytest.raises(ConfigError, match="has no model recommend"):
        list_published_generations(repo)
    with pytest.raises(ArtifactError, match=r"recommend/config\.pbtxt cannot be read.*make export"):
        read_pinned_generation(repo)


@pytest.mark.parametrize("move", [partial(activate, "localhost:1"), pin], ids=["activate", "pin"])
def test_no_move_while_another_one_or_a_publication_is_under_way(repo, move, monkeypatch):
    toys.publish(repo, 2)
    monkeypatch.setattr("repository.lock.time", PatientClock())
    with (
        hold_publication_lock(repo),
        pytest.raises(ServerError, match=r"Another publication or move has held .*repo for 600 s\. Wait until it ends"),
    ):
        move(repo, 2)
    assert read_pinned_generation(repo) == 1
    pin(repo, 2)
    assert read_pinned_generation(repo) == 2


@pytest.mark.parametrize(
    ("folder", "said"),
    [
        ("absent", r"There is no model repository at .*absent.*make export"),
        ("", r"cannot be written: Is a directory\. .*make the folder"),
    ],
)
def test_a_lock_needs_a_repository_that_can_be_written(tmp_path, folder, said):
    (tmp_path / LOCK_FILE).mkdir()
    with pytest.raises(ConfigError, match=said), hold_publication_lock(tmp_path / folder):
        pass
    assert [path.name for path in tmp_path.iterdir()] == [LOCK_FILE]


def test_only_a_running_server_of_this_repository_holds_generations(repo, tmp_path):
    ports, tag = find_free_ports(), draw_tag()
    double = TritonDouble(repo, ports.grpc)
    double.states = {("first", 1): "READY", ("first", 2): "LOADING", ("first", 3): "UNAVAILABLE"}
    with run_tagged(tag) as process:
        running = ServerState(process.pid, tag, repo, Path("/log"), ports)
        running.save(tmp_path)
        replace(running, tag="ended", ports=Ports(grpc=6, http=5, metrics=4)).save(tmp_path)
        replace(running, repo=tmp_path / "other", ports=Ports(grpc=3, http=2, metrics=1)).save(tmp_path)
        assert find_held_generations(repo, tmp_path) == {1, 2}
        assert find_held_generations(tmp_path / "third", tmp_path) == set()
        double.stop()
        assert find_held_generations(repo, tmp_path) is None  # it does not say


def test_nothing_is_published_while_a_server_starts(repo):
    refused = pytest.raises(ServerError, match="Another publication or move")
    with publish_nothing(repo), refused, hold_publication_lock(repo, timeout_s=0):
        pass
    with hold_publication_lock(repo, timeout_s=0):
        pass


@pytest.mark.parametrize("is_writable", [True, False])
def test_a_server_starts_although_the_lock_cannot_be_had(repo, monkeypatch, is_writable):
    monkeypatch.setattr(activation, "PUBLICATION_TIMEOUT_S", 0.0)
    with hold_publication_lock(repo):
        if not is_writable:
            (repo / LOCK_FILE).unlink()
            (repo / LOCK_FILE).mkdir()  # cannot be opened, as in a read-only repository
        started = False
        with publish_nothing(repo):
            started = True
    assert started
