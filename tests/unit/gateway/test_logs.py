"""A gateway logs JSON with the request's id, and nothing of the shop's."""

import json
import logging
import os
import subprocess
import sys

import pytest

from repository.triton.code import PROJECT
from server.start.ports import find_free_port
from serving.contract.logs import JsonFormatter, format_json_line
from tests.certificates import make_certificate
from tests.unit.clients.grpc_double import GrpcDouble
from tests.unit.gateway.conftest import failing
from tests.waiting import until
from triton_recommender import CircuitOpen, Overloaded


@pytest.fixture
def lines(caplog):
    """lines() -> what the gateway has logged so far, as machines read it."""
    return lambda: [json.loads(JsonFormatter().format(record)) for record in caplog.records if record.name == "gateway"]


def test_a_line_is_one_object_with_utc_time():
    line = format_json_line("WARNING", "gateway", 'two\nlines, "quoted"', 1_700_000_000.25, request_id="r-1")
    assert "\n" not in line
    time = "2023-11-14T22:13:20.250Z"
    message = 'two\nlines, "quoted"'
    expected = {"time": time, "level": "WARNING", "logger": "gateway", "message": message, "request_id": "r-1"}
    assert json.loads(line) == expected


def test_an_exception_is_in_its_line(caplog):
    try:
        raise ZeroDivisionError("of nothing")
    except ZeroDivisionError:
        logging.getLogger("gateway").exception("failed")
    text = JsonFormatter().format(caplog.records[-1])
    assert "\n" not in text
    assert "ZeroDivisionError: of nothing" in json.loads(text)["exception"]


def test_a_fallback_is_logged_with_the_id_that_the_caller_got_and_without_the_user(gateway, lines):
    answer = gateway(failing()).recommend(user="4711")
    (line,) = lines()
    assert (line["level"], line["request_id"], line["reason"]) == ("WARNING", answer["request_id"], "UNAVAILABLE")
    assert "4711" not in json.dumps(line)


@pytest.mark.parametrize("error", [CircuitOpen("Not asked."), Overloaded("Full.")])
def test_what_every_request_gets_while_servers_are_away_or_overloaded_is_counted_and_not_logged(gateway, lines, error):
    door = gateway(failing(error))
    assert door.recommend(user="4711")["degraded"] == ["gateway_fallback"]
    door.read_error("GET", "/v1/recommendations?user=4711&fallback=none", status=503)
    assert lines() == []
    assert door.read_metric("gateway_fallbacks_total") == {f'{{reason="{error.status}"}}': 1.0}


def test_an_answer_of_a_generation_that_is_not_served_any_more_has_no_reasons_and_no_traceback(gateway, lines):
    door = gateway()
    door.shop.server.served_generation = 99
    answer = door.recommend(user="7", reasons="true")
    assert [item["reasons"] for item in answer["items"]] == [None] * 3
    (line,) = (line for line in lines() if line["message"].startswith("an answer has no reasons: generation is 99; expected 1"))
    assert line["request_id"] == answer["request_id"]
    assert "exception" not in line


def test_requests_are_logged_only_where_the_settings_say_so(gateway, lines):
    gateway().recommend(user="4711")
    assert lines() == []
    response = gateway(log_requests=True).ask("GET", "/v1/recommendations", params={"user": "4711", "exclude": "1"})
    (line,) = lines()
    assert line["request_id"] == response.headers["x-request-id"] == response.json()["request_id"]
    assert (line["method"], line["route"], line["status"]) == ("GET", "/v1/recommendations", 200)
    assert line["seconds"] >= 0
    assert "4711" not in json.dumps(line)


def test_a_refused_request_is_logged_too(gateway, lines):
    gateway(log_requests=True, tokens={"0" * 64: "shop"}).ask("GET", "/v1/recommendations", params={"user": "1"})
    (line,) = lines()
    assert (line["status"], "request_id" in line) == (401, False)


def test_grpc_writes_no_lines_of_its_own_into_the_log(repo, tmp_path):
    """A server that speaks no TLS, though the gateway expects it: the C core logs each handshake that fails."""
    make_certificate(tmp_path, "server")
    server, log = GrpcDouble(lambda query: []), tmp_path / "log"
    options = ["--repo", repo, "--server", server.url, "--server-authorities", tmp_path / "server.pem"]
    command = [sys.executable, "-m", "gateway", "serve", *map(str, options), "--port", str(find_free_port())]
    env = {name: value for name, value in os.environ.items() if name != "GRPC_VERBOSITY"}
    with log.open("w") as output, subprocess.Popen(command, cwd=PROJECT, env=env, stdout=output, stderr=output) as process:
        try:
            until(lambda: "listens at" in log.read_text())
        finally:
            process.terminate()
            server.stop()
    messages = [json.loads(line)["message"] for line in log.read_text().splitlines()]
    assert any("Tls handshake failed" in message for message in messages)
