"""The timer, the service and the CronJob of continuous training run a command that exists, with options that it has."""

from __future__ import annotations

import configparser
import shlex
from pathlib import Path
from typing import Any

import yaml
from typer import Typer
from typer.main import get_command

from export import __main__ as export
from repository.triton.code import PROJECT
from server import __main__ as server

SYSTEMD = PROJECT / "deploy" / "systemd"
COMMAND = ["-m", "export", "follow"]


def read_unit(path: Path) -> configparser.ConfigParser:
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(path)
    return unit


def parse_options(arguments: list[str], app: Typer = export.app, name: str = "follow") -> dict[str, Any]:
    """Parse options of a command as it does, by default `export follow`. Raises click's UsageError for one that it lacks."""
    command = get_command(app).commands[name]  # type: ignore[attr-defined]
    return command.make_context(name, list(arguments)).params


def test_the_service_does_one_round_whose_generation_a_share_of_the_users_meets():
    service = read_unit(SYSTEMD / "recommender-follow.service")["Service"]
    program, *words = shlex.split(service["ExecStart"].replace("${FOLLOW_SHARE}", "0.5"))
    assert program == "/opt/recommender/.venv/bin/python"
    assert words[:3] == COMMAND
    options = parse_options(words[3:])
    assert (options["once"], options["share"], options["repo"]) == (True, 0.5, Path("/srv/recommender/models"))
    assert "Environment=FOLLOW_SHARE=0.5\n" in (SYSTEMD / "recommender-follow.service").read_text()
    assert service["Type"] == "oneshot"


def test_training_leaves_the_processors_to_the_server():
    """Where the kernel shares them among units, only weights count: 100 is the default, which the server has."""
    training, server = (read_unit(SYSTEMD / f"{name}.service")["Service"] for name in ("recommender-follow", "recommender"))
    assert int(training["CPUWeight"]) <= 0.01 * int(server.get("CPUWeight", "100"))


def test_the_timer_starts_the_service_again_an_hour_after_it_ended():
    timer = read_unit(SYSTEMD / "recommender-follow.timer")
    assert timer["Timer"]["OnUnitInactiveSec"] == "1h"
    assert timer["Install"]["WantedBy"] == "timers.target"
    assert (SYSTEMD / "recommender-follow.timer").with_suffix(".service").is_file()


def test_the_cron_job_does_one_round_at_a_time():
    path = PROJECT / "deploy" / "kubernetes" / "components" / "follow" / "cron-job.yaml"
    spec = yaml.safe_load(path.read_text())["spec"]
    (container,) = spec["jobTemplate"]["spec"]["template"]["spec"]["containers"]
    assert spec["concurrencyPolicy"] == "Forbid"
    assert '"$PY" -m export follow --once "$@"' in (PROJECT / "deploy" / "follow.sh").read_text()
    options = parse_options(["--once", *container["args"]])
    assert options["repo"] == Path("/srv/models")
    assert options["keep"] > 2  # it cannot ask the pods what they have loaded


def test_servers_that_only_read_the_repository_move_to_what_a_round_publishes():
    pods = yaml.safe_load((PROJECT / "deploy" / "kubernetes" / "workload" / "statefulset.yaml").read_text())
    in_pod = pods["spec"]["template"]["spec"]["containers"][0]
    in_compose = yaml.safe_load((PROJECT / "deploy" / "compose.cpu.yaml").read_text())["services"]["triton"]
    mount = {"name": "models", "mountPath": "/srv/models", "readOnly": True}
    assert mount in in_pod["volumeMounts"]
    assert "${REPO:-../model_repository}:/srv/models:ro" in in_compose["volumes"]
    service = PROJECT / "deploy" / "kubernetes" / "overlays" / "kserve" / "inference-service.yaml"
    predictor = yaml.safe_load(service.read_text())["spec"]["predictor"]
    assert [container["name"] for container in predictor["containers"] if mount not in container["volumeMounts"]] == []
    (in_kserve,) = (container for container in predictor["containers"] if container["name"] == "server")
    for command, *options in (in_pod["args"], in_compose["command"], in_kserve["args"]):
        assert command == "server"
        assert parse_options(options, server.app, "start")["follow_pin"] is True
