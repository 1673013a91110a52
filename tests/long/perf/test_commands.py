"""The command line over a run that was kept: gate, report, and what it refuses."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from perf import cli
from serving.contract.errors import ConfigError, RecommenderError
from serving.contract.tensors import STAGES


@pytest.fixture
def kept_run(run, tmp_path):
    """The folder of a finished run."""
    folder = tmp_path / "results" / "20260101-000000"
    run.save(folder)
    for raw in tmp_path.glob("*.npz"):
        (folder / raw.name).write_bytes(raw.read_bytes())
    return folder


def invoke(*arguments, **options):
    return CliRunner().invoke(cli.app, [str(argument) for argument in arguments], **options)


def slo_file(folder: Path, text: str) -> Path:
    (folder / "slo.toml").write_text(text)
    return folder / "slo.toml"


@pytest.mark.parametrize(("at_most", "exit_code", "word"), [(1_000, 0, "kept"), (0.001, 1, "broken")])
def test_the_gate_answers_with_its_exit_code_and_a_last_line(kept_run, tmp_path, at_most, exit_code, word):
    answer = invoke("gate", kept_run, "--slo", slo_file(tmp_path, f"[p99_ms]\nat_most = {at_most}\n"))
    assert answer.exit_code == exit_code
    document = json.loads(answer.stdout.splitlines()[-1])
    assert document["slo"] == word
    assert document["broken"] == ([] if exit_code == 0 else ["p99_ms"])


@pytest.mark.parametrize(("equal", "exit_code"), [("true", 0), ("false", 1)])
def test_answers_that_differ_break_whatever_is_bounded(tmp_path, equal, exit_code):
    bounds = slo_file(tmp_path, "[p99_ms]\nat_most = 5\n")
    answer = invoke("gate", "-", "--slo", bounds, input=f'{{"p99_ms": 4.0, "answers_equal": {equal}}}')
    assert answer.exit_code == exit_code
    assert json.loads(answer.stdout.splitlines()[-1])["broken"] == ["answers_equal"] * exit_code


def test_the_gate_reads_the_last_line_of_a_log(tmp_path):
    bounds = slo_file(tmp_path, "[p99_ms]\nat_most = 5\n")
    (tmp_path / "log").write_text('a table\n{"p99_ms": 4.0}\n')
    assert invoke("gate", tmp_path / "log", "--slo", bounds).exit_code == 0
    assert invoke("gate", "-", "--slo", bounds, input='{"p99_ms": 6.0}').exit_code == 1
    (tmp_path / "log").write_text("a table\n")
    assert isinstance(invoke("gate", tmp_path / "log", "--slo", bounds).exception, ConfigError)


@pytest.mark.parametrize("text", ["", "[1]"])
def test_a_gate_without_a_document_says_so(text):
    error = invoke("gate", "-", input=text).exception
    assert isinstance(error, ConfigError)
    assert "The last line of - is not the JSON of a run" in str(error)


@pytest.mark.parametrize("kept_bytes", [None, 0, 300])
def test_a_report_without_its_raw_requests_says_which_file_is_missing(kept_run, kept_bytes):
    """Missing, or cut off, as a full disk leaves it."""
    for raw in kept_run.glob("*.npz"):
        raw.unlink() if kept_bytes is None else raw.write_bytes(raw.read_bytes()[:kept_bytes])
    error = invoke("report", "--run", kept_run).exception
    assert isinstance(error, ConfigError)
    assert ".npz cannot be read" in str(error)


def test_options_before_a_command_that_would_not_see_them_are_refused():
    error = invoke("--rounds", "2", "sweep", "--repo", "nowhere").exception
    assert isinstance(error, ConfigError)
    assert str(error) == "--rounds must follow sweep, which ignores options before it. Write: root sweep --rounds …"
    error = invoke("live", "--results", "elsewhere", "reads", "--users", "10").exception
    assert str(error) == "--results must follow reads, which ignores options before it. Write: root live reads --results …"


def test_a_server_that_is_not_the_one_asked_for_is_told(tmp_path):
    """Nothing answers at this port, so that a server of the command's own is about to be measured."""
    answer = invoke("load", "--rate", 5, "--url", "localhost:9", "--repo", tmp_path / "none")
    assert isinstance(answer.exception, RecommenderError)  # there is nothing to serve
    told = "".join(answer.stderr.split())  # the lines of a console are broken, also in a long path
    assert "".join(f"No server answers at localhost:9: one is started on {tmp_path / 'none'}".split()) in told


def test_a_result_states_the_command_that_repeats_it(tmp_path, monkeypatch):
    monkeypatch.setattr("perf.live.cli.CALLS", 20)
    answer = invoke("live", "reads", "--users", "50,100", "--results", tmp_path)
    assert answer.exit_code in (0, 1)  # a busy machine misses its bounds
    written = json.loads((tmp_path / "live-reads.json").read_text())["command"]
    assert written == "python -m perf live reads --users 50,100"
    assert json.loads(answer.stdout.splitlines()[-1])["command"] == written


def test_arrivals_that_are_misspelt_are_refused_with_all_that_there_are(tmp_path):
    error = invoke("load", "--rate", "10", "--arrivals", "brusts", "--repo", tmp_path).exception
    assert isinstance(error, ConfigError)
    assert "--arrivals is brusts; expected poisson, bursts, volleys," in str(error)


def test_an_unknown_transport_is_refused_before_a_server_is_looked_for(tmp_path):
    error = invoke("sweep", "--transport", "pigeon", "--repo", tmp_path).exception
    assert isinstance(error, ConfigError)
    assert str(error) == "There is no transport 'pigeon'; these are: grpc, http."


@pytest.mark.parametrize("text", ["", "a,b", "0", "1,-2", "inf"])
def test_levels_must_be_positive_numbers(text):
    assert isinstance(invoke("sweep", "--clients", text).exception, ConfigError)
    assert isinstance(invoke("live", "reads", "--users", text).exception, ConfigError)


@pytest.mark.parametrize("command", [("sweep", "--clients"), ("live", "reads", "--users")])
def test_numbers_of_clients_and_users_must_be_whole(command):
    assert str(invoke(*command, "1,1.5").exception) == "'1,1.5' is not a list of whole numbers. Example: 1,8,32."


@pytest.mark.parametrize(
    ("model", "stages", "message"),
    [("rank", (), "fused layout has no model 'rank' of its own"), ("renk", STAGES, "these are: recommend, preprocess")],
)
def test_a_model_that_is_not_served_is_refused(model, stages, message):
    with pytest.raises(ConfigError, match=message):
        cli.require_model(model, stages)
