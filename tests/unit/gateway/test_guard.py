"""The door: what strangers, slow callers and large bodies get."""

from __future__ import annotations

import asyncio
import hashlib
import os
import resource
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from gateway.edge.guard import TokenBucket
from gateway.edge.tokens import add_token, hash_token, read_tokens
from gateway.settings import GatewaySettings, read_settings
from serving.contract.errors import ConfigError

EVENT = {"user": 7, "item": 3}
TOKENS, RIGHT = {hash_token("right"): "shop"}, {"authorization": "Bearer right"}


def test_who_brings_no_valid_token_gets_nothing_of_the_shops(gateway, tmp_path):
    token = add_token(tmp_path / "tokens.txt", "shop")
    tokens = read_tokens(tmp_path / "tokens.txt")
    assert tokens == {hashlib.sha256(token.encode()).hexdigest(): "shop"}
    door = gateway(tokens=tokens)
    for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": f"Basic {token}"}):
        for path in ("/v1/recommendations?user=7", "/metrics", "/openapi.json", "/v1/explain?user=7&item=3"):
            response = door.ask("GET", path, headers=headers)
            assert response.status_code == 401
            assert response.headers["www-authenticate"] == "Bearer"
    assert door.shop.queries == []
    assert door.ask("GET", "/healthz").status_code == 200
    headers = {"authorization": f"Bearer {token}"}
    assert door.ask("GET", "/v1/recommendations?user=7", headers=headers).status_code == 200


@pytest.mark.parametrize("host", ["localhost", "LocalHost:8080", "127.0.0.1:9", "[::1]:8080", "[::1]", "10.0.0.7:8080", ""])
def test_a_gateway_without_tokens_answers_at_localhost_and_at_addresses(gateway, host):
    assert gateway().ask("GET", "/v1/recommendations?user=7", headers={"host": host}).status_code == 200


@pytest.mark.parametrize("host", ["shop.example", "shop.example:8080", "localhost.shop.example", "127.0.0.1.shop.example:8080"])
def test_a_web_page_whose_name_leads_here_gets_nothing_of_a_gateway_without_tokens(gateway, host):
    """DNS rebinding: the browser sends the name of the page, which its owner lets resolve to 127.0.0.1."""
    door, headers = gateway(), {"host": host}
    for method, path, body in (("GET", "/v1/recommendations?user=7", None), ("POST", "/v1/events", EVENT), ("GET", "/", None)):
        response = door.ask(method, path, json=body, headers=headers)
        assert (response.status_code, response.json()["error"]["code"]) == (421, "UNKNOWN_HOST")
    assert door.shop.queries == []
    assert door.ask("GET", "/healthz", headers=headers).status_code == 200
    assert gateway(hosts=("Shop.example", host.partition(":")[0])).ask("GET", "/", headers=headers).status_code == 200
    assert gateway(tokens=TOKENS).ask("GET", "/v1/recommendations?user=7", headers=headers | RIGHT).status_code == 200


def test_a_web_page_from_elsewhere_may_post_nothing_to_a_gateway_without_tokens(gateway):
    """No preflight protects a form's body, which the gateway reads as JSON."""
    door = gateway()
    for site, status in (("cross-site", 403), ("same-site", 403), ("same-origin", 200), ("none", 200)):
        assert door.ask("POST", "/v1/events", json=EVENT, headers={"sec-fetch-site": site}).status_code == status, site
    assert door.ask("GET", "/", headers={"sec-fetch-site": "cross-site"}).status_code == 200  # a link to the page
    host = "127.0.0.1:8080"
    for origin, status in (("https://evil.example", 403), ("null", 403), (f"http://{host}", 200)):
        headers = {"host": host, "origin": origin}
        assert door.ask("POST", "/v1/events", json=EVENT, headers=headers).status_code == status, origin
    headers = RIGHT | {"sec-fetch-site": "cross-site"}
    assert gateway(tokens=TOKENS).ask("POST", "/v1/events", json=EVENT, headers=headers).status_code == 200


def test_a_token_is_kept_as_a_hash_alone_and_by_its_owner_alone(tmp_path):
    token = add_token(tmp_path / "tokens.txt", "shop")
    assert token not in (tmp_path / "tokens.txt").read_text()
    assert (tmp_path / "tokens.txt").stat().st_mode & 0o077 == 0
    with pytest.raises(ConfigError, match="has a token called shop already"):
        add_token(tmp_path / "tokens.txt", "shop")


def test_the_last_token_may_be_revoked_and_another_made(tmp_path):
    file = tmp_path / "tokens.txt"
    file.touch(mode=0o600)
    with pytest.raises(ConfigError, match="holds no token"):
        read_tokens(file)
    add_token(file, "shop")
    file.write_text("\n" + file.read_text().strip())  # as an editor may leave it
    add_token(file, "mail")
    assert list(read_tokens(file).values()) == ["shop", "mail"]


@pytest.mark.parametrize(("content", "said"), [(b"\xff", "cannot be read"), (b"\n\nshop", "line 3: expected a name")])
def test_a_file_that_holds_no_tokens_is_refused(tmp_path, content, said):
    (tmp_path / "tokens.txt").write_bytes(content)
    with pytest.raises(ConfigError, match=said):
        read_tokens(tmp_path / "tokens.txt")
    with pytest.raises(ConfigError, match="cannot be written"):
        add_token(tmp_path / "nowhere" / "tokens.txt", "shop")


def test_a_full_disk_leaves_no_file_without_a_token_and_none_with_half_a_line(tmp_path):
    file = tmp_path / "tokens.txt"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    for tokens in ([], ["shop"]):
        for name in tokens:
            add_token(file, name)
        before = file.read_text() if file.exists() else None
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(before or "") + 9, hard))  # which stands for a full disk
        try:
            with pytest.raises(ConfigError, match=r"tokens\.txt cannot be written"):
                add_token(file, "mail")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert (file.read_text() if file.exists() else None) == before


def test_a_file_of_tokens_that_others_may_read_or_change_gets_no_further_one(tmp_path):
    file = tmp_path / "tokens.txt"
    add_token(file, "shop")
    file.chmod(0o640)
    tmp_path.chmod(0o710)
    with pytest.raises(ConfigError, match=f"has mode 0640; expected 0600.* run `chmod 600 {file}`"):
        add_token(file, "mail")
    file.chmod(0o600)
    add_token(file, "mail")


def test_a_file_of_tokens_in_a_folder_that_others_cannot_enter_gets_a_further_one(tmp_path):
    """As with Compose, where the user of the container reads the file (deploy/README.md)."""
    file = tmp_path / "tokens.txt"
    add_token(file, "shop")
    file.chmod(0o644)
    tmp_path.chmod(0o700)
    add_token(file, "mail")
    assert sorted(read_tokens(file).values()) == ["mail", "shop"]


def test_a_folder_in_place_of_a_file_of_tokens_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=f"{tmp_path} is a folder; expected a file, such as {tmp_path}/tokens.txt"):
        add_token(tmp_path, "shop")


NOBODY = """
import os
from pathlib import Path
from gateway.edge.tokens import add_token

if os.getuid() == 0:  # who may read everything
    os.setuid(65534)
add_token(Path("tokens.txt"), "mail")
"""


def test_a_file_of_tokens_that_cannot_be_read_is_named_with_the_remedy(tmp_path):
    add_token(tmp_path / "tokens.txt", "shop")
    (tmp_path / "tokens.txt").chmod(0)
    tmp_path.chmod(0o755)
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])}
    ended = subprocess.run([sys.executable, "-c", NOBODY], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60)
    assert "ConfigError: tokens.txt cannot be read: permission denied. Run the command as the user who owns it" in ended.stderr


def test_a_body_that_is_too_large_or_comes_in_chunks_is_refused(gateway):
    async def chunks():
        yield b"{}"

    door = gateway(body_bytes=100)
    assert door.ask("POST", "/v1/events", content=b" " * 101).status_code == 413
    assert door.ask("POST", "/v1/events", content=chunks()).status_code == 411


@pytest.mark.parametrize("path", ["/healthz", "/readyz", "/", "/console.js"])
def test_a_stranger_may_send_no_body(gateway, path):
    own = gateway(tokens={hash_token("secret"): "shop"})
    assert own.read_error("POST", path, 413, content=b"x")["message"] == "This path takes no body. Send none."
    assert own.ask("GET", path, headers={"content-length": "0"}).status_code == 200


def test_a_body_that_trickles_in_is_not_waited_for(gateway):
    door = gateway(body_timeout_s=0.05)

    async def trickle():
        yield b"{"
        await asyncio.sleep(60)

    assert door.ask("POST", "/v1/events", content=trickle(), headers={"content-length": "2"}).status_code == 408


@pytest.mark.parametrize("codings", [["gzip"], ["identity, gzip"], ["gzip", "identity"]])
def test_a_compressed_body_is_refused_unread(gateway, codings):
    headers = [("content-encoding", coding) for coding in codings]
    response = gateway().ask("POST", "/v1/events", content=b"\x1f\x8b", headers=headers)
    assert response.status_code == 415


@pytest.mark.parametrize("coding", ["identity", "Identity", ""])
def test_a_body_that_is_said_to_be_as_it_is_is_taken(gateway, coding):
    response = gateway().ask("POST", "/v1/events", json=EVENT, headers={"content-encoding": coding})
    assert response.status_code == 200, response.text


def test_one_client_may_not_take_all(gateway):
    door = gateway(requests_per_s=0.001, burst=2)
    statuses = [door.ask("GET", "/v1/generation").status_code for _ in range(3)]
    assert statuses == [200, 200, 429]
    assert int(door.ask("GET", "/v1/generation").headers["retry-after"]) > 1
    probes = [(method, path) for method in ("GET", "HEAD") for path in ("/healthz", "/readyz")]
    assert [door.ask(*probe).status_code for probe in probes] == [200] * 4


def test_who_asks_for_recommendations_too_often_gets_popular_items(gateway):
    tokens = {hash_token(name): name for name in ("shop", "operator")}
    door = gateway(tokens=tokens, requests_per_s=0.001, burst=2)

    def ask(path: str, token: str = "shop") -> httpx.Response:
        return door.ask("GET", path, headers={"authorization": f"Bearer {token}"})

    answers = [ask("/v1/recommendations?user=7&exclude=5&k=3").json() for _ in range(3)]
    assert [answer["degraded"] for answer in answers] == [[], [], ["gateway_fallback"]]
    assert len(answers[2]["items"]) == 3
    assert 5 not in [item["id"] for item in answers[2]["items"]]
    assert ask("/v1/recommendations?user=anna").status_code == 400
    refused = ask("/v1/recommendations?user=7&fallback=none")
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "RATE_LIMITED")
    assert int(refused.headers["retry-after"]) > 1
    assert 'gateway_fallbacks_total{reason="RATE_LIMITED"} 1.0' in ask("/metrics", "operator").text


def test_guesses_of_a_token_are_limited_too_and_take_nothing_from_who_has_one(gateway):
    door = gateway(tokens=TOKENS, requests_per_s=0.001, burst=2)
    asked = [door.ask("GET", "/v1/recommendations?user=7", headers={"authorization": "Bearer wrong"}) for _ in range(3)]
    assert [response.status_code for response in asked] == [401, 401, 429]
    assert door.ask("GET", "/v1/recommendations?user=7", headers=RIGHT).status_code == 200


def test_a_bucket_fills_again():
    bucket = TokenBucket(per_s=10.0, burst=1, now_s=0.0)
    assert bucket.take(0.0) == 0.0
    assert bucket.take(0.05) == pytest.approx(0.05)
    assert bucket.take(0.1) == 0.0


def test_every_answer_forbids_scripts_from_elsewhere(gateway):
    policy = gateway().ask("GET", "/healthz").headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "script-src 'self'" in policy


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("host = '0.0.0.0'", "other machines can reach, but no tokens are required"),
        ("colour = 1", "There is no section or key 'colour'. Allowed: host, certificate,"),
        (
            "hosts = ['https://shop.example']",
            "'https://shop.example' is no host name; expected one without scheme, port and path",
        ),
        ("body_bytes = 0", "body_bytes: Input should be greater than 0"),
        ("burst = '9'", "burst: Input should be a valid integer, got '9'."),
        ("servers = 'shop:8001'", "servers: Input should be a valid tuple, got 'shop:8001'"),
        ("servers = ['shop']", "servers: 'shop' is no address; expected host:port of a server's gRPC"),
        ("host", "is not valid TOML"),
        ("# für alle", "is not valid TOML: 'utf-8' codec can't decode"),
        ("tokens = 5", "tokens is 5; expected the path of a file"),
        ("key = ['gateway.pem']", r"key is \['gateway.pem'\]; expected the path of a file"),
    ],
)
def test_settings_that_cannot_be_are_refused(tmp_path, text, said):
    (tmp_path / "gateway.toml").write_text(text, "latin-1")
    with pytest.raises(ConfigError, match=said):
        read_settings(tmp_path / "gateway.toml")


def test_tokens_are_looked_for_beside_the_settings(tmp_path):
    (tmp_path / "gateway.toml").write_text("host = '0.0.0.0'\ntokens = 'tokens.txt'")
    with pytest.raises(ConfigError, match=r"tokens\.txt, which is no file"):
        read_settings(tmp_path / "gateway.toml")
    (tmp_path / "tokens.txt").touch()
    assert read_settings(tmp_path / "gateway.toml") == GatewaySettings(host="0.0.0.0", tokens=tmp_path / "tokens.txt")
