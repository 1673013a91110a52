"""Lines of tritonserver 2.51's log, and the contents of a state file."""

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from server.processes import identify_process, lives
from server.start.ports import Ports
from server.state import ServerState, find_unreadable_states, make_state_path, read_known_servers, read_state
from server.status import log
from server.status.log import explain, explain_end, find_first_failure, find_unfinished, rotate
from tests.unit.server.conftest import call

HEAD = "E1121 00:58:59.746228 20082 model_lifecycle.cc:642] "
HARMLESS = """E1121 01:13:33.037808 1430 server.cc:241] "CudaDriverHelper has not been initialized."
I1121 01:13:33.037914 1430 cuda_memory_manager.cc:117] "CUDA memory pool disabled\""""
LOADING = 'I1121 01:13:33.039156 1430 model_lifecycle.cc:472] "loading: rank:1"'


@pytest.mark.parametrize(
    ("message", "model", "reason"),
    [
        (
            r"failed to load 'rank' version 3: Internal: ArtifactError: cut short\n\nAt:\n  model.py(1)",
            "rank",
            "ArtifactError: cut short\n",
        ),
        (
            "failed to load 'rank' version 3: Internal: Stub process 'rank_0_0' is not healthy.",
            "rank",
            "process ended while loading: it crashed, or was killed for lack of memory. Internal: Stub",
        ),
        (
            "Poll failed for model directory 'rank': unexpected directory name 'rank' for model 'x'",
            "rank",
            "unexpected directory",
        ),
        (
            "ensemble 'recommend' depends on 'rank' whose required version 7 is not loaded.",
            "recommend",
            "version 7 is not loaded",
        ),
        (
            "Invalid argument: in ensemble recommend, ensemble tensor ta is mapped from nothing",
            "recommend",
            "mapped from nothing",
        ),
    ],
)
def test_first_failure_names_the_model_and_unfolds_the_reason(message, model, reason):
    failure = find_first_failure(
        "\n".join([HARMLESS, LOADING, f'{HEAD}"{message}"', f"{HEAD}\"failed to load 'other' version 1: later\""])
    )
    assert failure is not None
    assert failure.model == model
    assert reason in failure.reason
    assert str(failure).startswith(f"model {model} failed to load:")


def test_a_log_without_a_failing_model():
    assert find_first_failure(f"{HARMLESS}\n{LOADING}\n") is None
    assert explain(f"{LOADING}\n{HARMLESS}\n").reason == LOADING  # every machine without a GPU says that
    assert explain("one\ntwo").reason == "one\ntwo"
    assert "nothing was written" in str(explain(""))


@pytest.mark.parametrize(
    ("last", "ended"),
    [
        ("Signal (6) received.\n 0# 0x0000", "it crashed: ended by SIGABRT"),
        ('Signal (15) received.\nI1121 server.cc:305] "Waiting"', "it was stopped (SIGTERM)"),
        ("", "it ended without a message, as after SIGKILL"),
    ],
)
def test_what_ended_a_server(last, ended):
    log = f'{HARMLESS}\nI1121 grpc_server.cc:2558] "Started GRPCInferenceService at 127.0.0.1:1"\n{last}'
    assert explain_end(log).startswith(ended)
    assert explain_end(HARMLESS) == "it ended before it served"


def test_a_crash_is_explained_by_what_was_thrown_and_not_by_older_lines():
    thrown = "terminate called after throwing 'lock_exception'"
    log = f'{HEAD}"old error"\n+---+\n| a |\n+---+\n{thrown}\nSignal (6) received.\n 0# 0x\n'
    assert explain(log).reason.splitlines()[-1] == thrown
    assert "| a |" not in explain(log).reason


def test_earlier_logs_are_kept_and_the_oldest_goes(tmp_path, monkeypatch):
    monkeypatch.setattr(log, "KEPT_LOGS", 3)
    path = tmp_path / "server.log"
    for number in range(5):
        path.write_text(str(number))
        rotate(path)
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == {
        "server.log.1": "4",
        "server.log.2": "3",
        "server.log.3": "2",
    }
    rotate(path)  # of a start that wrote none
    assert not path.exists()


def test_models_that_began_to_load_and_did_not_finish():
    log = f"{LOADING}\n{LOADING.replace('rank', 'rerank')}\nI1121 x] \"successfully loaded 'rank'\""
    failure = find_unfinished(log, dead=1)
    assert failure.model == "rerank"
    assert "1 Python model process(es) ended" in failure.reason


STATE = ServerState(1, "triton_9_a_", Path("/repo"), Path("/log"), Ports(9, 8, 7), {"threads": 2}, generation=1)
OTHER = ServerState(12, "triton_5_b_", Path("/repo"), Path("/log"), Ports(5, 4, 3))  # at other ports


def test_state_is_kept_found_and_forgotten(tmp_path):
    STATE.save(tmp_path)
    OTHER.save(tmp_path)
    assert read_known_servers(tmp_path) == [OTHER, STATE]
    STATE.forget(tmp_path)
    STATE.forget(tmp_path)
    assert read_known_servers(tmp_path) == [OTHER]


def test_a_server_that_was_replaced_does_not_take_the_file_of_the_one_after_it(tmp_path):
    second = replace(STATE, pid=2, tag="triton_9_b_")
    second.save(tmp_path)
    STATE.forget(tmp_path)
    assert read_known_servers(tmp_path) == [second]


def test_a_change_keeps_what_another_process_saved_meanwhile(tmp_path):
    STATE.save(tmp_path)
    replace(STATE, pid=2).save(tmp_path)  # restarted
    assert STATE.change(tmp_path, generation=3) == replace(STATE, pid=2, generation=3)
    assert read_known_servers(tmp_path) == [replace(STATE, pid=2, generation=3)]


def test_changes_of_many_threads_are_all_kept(tmp_path):
    STATE.save(tmp_path)
    changes = [{"pid": 2}, {"content": "abc"}, {"owner": "me"}, {"generation": 3}, {"fault": "damaged"}]
    with ThreadPoolExecutor(len(changes)) as threads:
        list(threads.map(lambda change: STATE.change(tmp_path, **change), changes))
    assert read_known_servers(tmp_path) == [replace(STATE, pid=2, content="abc", owner="me", generation=3, fault="damaged")]


def test_a_change_does_not_bring_a_stopped_server_back_nor_touch_the_next_one(tmp_path):
    assert STATE.change(tmp_path, generation=3).generation == 3
    assert read_known_servers(tmp_path) == []
    following = replace(STATE, tag="triton_9_b_")
    following.save(tmp_path)
    STATE.change(tmp_path, generation=3)
    assert read_known_servers(tmp_path) == [following]


def test_a_process_is_known_by_more_than_its_number():
    assert lives(identify_process())
    assert not lives(identify_process().replace("since 1", "since 2"))
    assert not lives("999999999 since 1.0")


GOOD = {"pid": 1, "tag": "triton_9_a_", "repo": "/repo", "log": "/log", "ports": {"grpc": 9, "http": 8, "metrics": 7}}
BAD: list[dict[str, Any]] = [
    {"pid": "abc"},
    {"pid": -1},
    {"tag": ""},
    {"ports": {"grpc": 0}},
    {"ports": {"grpc": "9"}},
    {"repo": 3},
    {"settings": "x"},
]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"pid": 1}', "\udcff", *(json.dumps(GOOD | bad) for bad in BAD)])
def test_a_state_file_that_names_no_server_is_passed_over_and_hides_no_other(tmp_path, text):
    OTHER.save(tmp_path)
    path = make_state_path(tmp_path, 9)
    path.write_text(text, errors="surrogateescape")
    assert read_state(path) is None
    assert read_known_servers(tmp_path) == [OTHER]
    assert find_unreadable_states(tmp_path) == [path]


def test_a_folder_in_the_place_of_a_state_file_is_passed_over(tmp_path):
    make_state_path(tmp_path, 9).mkdir(parents=True)
    assert read_known_servers(tmp_path) == []


def test_status_lists_the_others_and_names_the_state_file_that_names_none(run_dir):
    path = make_state_path(run_dir, 9)
    path.parent.mkdir()
    path.write_text(json.dumps(GOOD | {"pid": "abc"}))
    result = call("status")
    assert result.exit_code == 1
    assert result.stdout.startswith("no server is running here")
    assert f"{path} names no server. Remove it" in result.stderr
