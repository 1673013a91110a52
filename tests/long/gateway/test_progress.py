"""`GET /v1/experiment`: how the experiment goes, computed beside the gateway and kept for some seconds."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import psutil
import pytest

from gateway import progress, schema
from gateway.edge.tokens import hash_token
from gateway.metrics import Metrics
from gateway.progress import KEPT_S, LogReports, watch_calibration
from live.exposures import Exposure, ExposureLog
from repository.experiments import end_experiment, find_experiment_folder, start_experiment
from serving.contract.errors import DependencyError
from serving.live.experiment import EXPERIMENT_FILE, Experiment
from tests.unit.gateway.conftest import Gateway

CALIBRATION = {"generation": 3, "error": 0.5, "bound": 0.2, "expected_rate": 0.08, "observed_rate": 0.04}


@pytest.fixture
def repo(own_repo) -> Path:
    return own_repo


@pytest.fixture
def door(repo) -> Gateway:
    return Gateway(repo, lambda query: [1, 2, 3])


def report(door: Gateway) -> dict:
    response = door.ask("GET", "/v1/experiment")
    assert response.status_code == 200, response.text
    schema.ExperimentReport.model_validate(response.json())
    return response.json()


def start(repo: Path) -> Experiment:
    experiment = start_experiment(repo, Experiment("spring", 1, 2, 0.25))
    log = ExposureLog(find_experiment_folder(repo), 1.0, keep_days=1, keep_bytes=1 << 30)
    for number in range(400):
        arm = "challenger" if number % 4 == 0 else "champion"
        time_ms = experiment.changed_ms + number
        assignment = experiment.find_assignment(arm)
        log.add(Exposure(f"a{number}", time_ms, number, 1, [1, 2], [1.0] * 2, [], "spring", arm, assignment=assignment))
    log.close()
    return experiment


def test_without_an_experiment_it_says_so_to_callers_with_a_token(repo):
    door = Gateway(repo, lambda query: [1, 2, 3], {hash_token("secret"): "shop"})
    assert door.ask("GET", "/v1/experiment").status_code == 401
    response = door.ask("GET", "/v1/experiment", headers={"authorization": "Bearer secret"})
    assert response.status_code == 200, response.text
    told = response.json()
    assert (told["experiment"], told["arms"], told["looks"]) == (None, [], [])
    assert told["decision"] == "no experiment was started"


def test_a_running_experiment_is_told_with_its_arms_and_looks(repo, door):
    start(repo)
    told = report(door)
    expected = {"name": "spring", "mode": "ab", "state": "running", "share": 0.25, "champion": 1, "challenger": 2}
    assert told["experiment"] == told["experiment"] | expected
    assert {arm["arm"]: (arm["answers"], arm["clicked"]) for arm in told["arms"]} == {
        "champion": (300, 0),
        "challenger": (100, 0),
    }
    assert told["looks"][-1]["difference"] == 0.0
    assert (told["looks"][-1]["low"], told["verdict"], told["decision"]) == (None, "undecided", "no decision yet")


def test_an_experiment_that_ended_says_why(repo, door):
    start(repo)
    end_experiment(repo, "its p99 is 200 ms", state="rolled back")
    told = report(door)
    assert told["decision"] == "rolled back: its p99 is 200 ms"
    assert (told["experiment"]["state"], told["experiment"]["share"]) == ("rolled back", 0.0)
    assert len(told["arms"]) == 2


def test_an_answer_is_kept_for_some_seconds(repo, monkeypatch, tmp_path):
    told = tmp_path / "told"
    (tmp_path / "trials.py").write_text(f"print(open({str(told)!r}).read())")
    monkeypatch.setattr(progress, "PROJECT", tmp_path)
    seconds = iter([0.0, 0.0, KEPT_S, KEPT_S + 1, KEPT_S + 1])
    reports = LogReports(repo, "progress", now=lambda: next(seconds))

    async def ask_three_times() -> list[str]:
        told.write_text("old")
        first = await reports.read_latest()
        told.write_text("new")
        return [report.decode().strip() for report in (first, await reports.read_latest(), await reports.read_latest())]

    assert asyncio.run(ask_three_times()) == ["old", "old", "new"]


def test_a_file_that_cannot_be_read_is_an_error_without_its_details(repo, door):
    start(repo)
    (find_experiment_folder(repo) / EXPERIMENT_FILE).write_text("{")
    said = door.read_error("GET", "/v1/experiment", 503)["message"]
    assert said == "The logs of answers and events cannot be read. The gateway's log has the details."


def test_a_report_that_hangs_is_killed_and_told_as_an_error(repo, monkeypatch, tmp_path):
    (tmp_path / "trials.py").write_text("import time\ntime.sleep(600)")
    monkeypatch.setattr(progress, "PROJECT", tmp_path)
    monkeypatch.setattr(progress, "TIMEOUT_S", 1.0)
    reports = LogReports(repo, "progress")

    async def ask_twice_at_once() -> tuple[bytes | BaseException, bytes | BaseException]:
        return await asyncio.gather(reports.read_latest(), reports.read_latest(), return_exceptions=True)

    for error in asyncio.run(ask_twice_at_once()):
        assert isinstance(error, DependencyError)
        assert "could not be read within 1 s" in str(error)
    running = [child for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE]
    assert not [child for child in running if "trials" in child.cmdline()]


async def wait_until_calibration(metrics: Metrics, is_shown: bool) -> None:
    async with asyncio.timeout(60.0):
        while ("gateway_calibration_error{" in metrics.render_page().decode()) != is_shown:
            await asyncio.sleep(0.01)


def test_calibration_is_shown_until_it_is_no_longer_known(repo, monkeypatch, tmp_path):
    monkeypatch.setattr(progress, "PROJECT", tmp_path)
    monkeypatch.setattr(progress, "CALIBRATED_EVERY_S", 0.01)
    metrics = Metrics()

    async def watch(report: dict, is_shown: bool) -> str:
        told = f"import sys\nassert sys.argv[1] == 'calibration'\nprint({json.dumps(report)!r})"
        (tmp_path / "trials.py").write_text(told)
        watching = asyncio.create_task(watch_calibration(LogReports(repo, "calibration"), metrics))
        await wait_until_calibration(metrics, is_shown)
        watching.cancel()
        return metrics.render_page().decode()

    page = asyncio.run(watch(CALIBRATION, is_shown=True))
    for name, value in (("error", 0.5), ("error_bound", 0.2), ("expected_click_rate", 0.08), ("observed_click_rate", 0.04)):
        assert f'gateway_calibration_{name}{{generation="3"}} {value}' in page
    asyncio.run(watch({"reason": "too few answers"}, is_shown=False))


def test_calibration_is_not_known_while_no_process_can_start(repo, monkeypatch, tmp_path, caplog):
    project, away = tmp_path / "project", tmp_path / "away"
    project.mkdir()
    (project / "trials.py").write_text(f"print({json.dumps(CALIBRATION)!r})")
    monkeypatch.setattr(progress, "PROJECT", project)
    monkeypatch.setattr(progress, "KEPT_S", 0.0)
    monkeypatch.setattr(progress, "CALIBRATED_EVERY_S", 0.01)
    metrics = Metrics()

    async def watch() -> None:
        reports = LogReports(repo, "calibration")
        watching = asyncio.create_task(watch_calibration(reports, metrics))
        await wait_until_calibration(metrics, is_shown=True)
        project.rename(away)  # an error of the system, as with too little memory
        await wait_until_calibration(metrics, is_shown=False)
        with pytest.raises(DependencyError, match="The gateway's log has the details"):
            await reports.read_latest()
        away.rename(project)
        await wait_until_calibration(metrics, is_shown=True)
        watching.cancel()

    asyncio.run(watch())
    assert "-m trials calibration cannot run: [Errno 2] No such file or directory" in caplog.text
