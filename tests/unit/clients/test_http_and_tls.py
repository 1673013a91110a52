"""The client over HTTP, and over TLS with either protocol."""

from __future__ import annotations

import subprocess
import time

import pytest

from server.start.ports import find_free_ports
from tests.unit.clients.conftest import ANSWER, both, recommend, use
from tests.unit.clients.grpc_double import GrpcDouble, require_callers_certificate
from triton_recommender import (
    AccessDenied,
    DeadlineExceeded,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
    Query,
    Recommendations,
    Recommender,
    ServerFault,
    Timeouts,
    Tls,
    Unavailable,
)


@both
def test_http_answers_as_grpc_does(kind, http):
    question = {"exclude": [20], "context": {"device": "phone", "store": 1, "basket": 9.5}, "history": [5]}
    ask = lambda shop: [lambda: shop.recommend(17850, **question), lambda: shop.observe(1, 2, "view"), shop.health]  # noqa: E731
    answer, sequence, [health] = use(kind, http.url, ask)
    assert answer.item_ids == (30, 10, 40)
    assert http.fake.queries[0] == Query(17850, [5], [20], {"device": "phone", "store": 1, "basket": 9.5})
    assert sequence == 1
    assert (health.ready, health.generation) == (True, 2)


@both
@pytest.mark.parametrize(
    ("status", "words", "error"),
    [
        (400, "shape", InvalidRequest),
        (401, "", AccessDenied),
        (403, "This API is restricted", AccessDenied),
        (404, "no such model", ModelNotFound),
        (400, "Request for unknown model: 'recommend' is not found", ModelNotFound),
        (429, "", Overloaded),
        (500, "stub died", ServerFault),
        (503, "starting", Unavailable),
    ],
)
def test_http_statuses_become_errors(kind, http, status, words, error):
    http.failures = [(status, words)] * 3
    with pytest.raises(error, match=words or "server"):
        use(kind, http.url, recommend, retries=0)


@both
def test_http_servers_that_are_away_or_slow(kind, http):
    def answer_late(query: Query) -> Recommendations:
        time.sleep(1.0)
        return ANSWER

    http.fake.handler = answer_late
    with pytest.raises(DeadlineExceeded):
        use(kind, http.url, recommend, timeouts=0.2)
    with pytest.raises(Unavailable, match=r"No server answers at http://127.*(Connection refused|Connect call failed)"):
        use(kind, f"http://127.0.0.1:{find_free_ports().http}", recommend)


@both
def test_mutual_tls(kind, certificates):
    key, certificate = certificates
    server = GrpcDouble(lambda query: ANSWER, require_callers_certificate(key, certificate))
    try:
        own = Tls(certificate, client_key=key, client_certificate=certificate)
        assert use(kind, server.url, recommend, tls=own, timeouts=Timeouts(10.0, connect=10.0)) == [ANSWER]
        for tls in (Tls(certificate), None):  # no certificate of its own; not encrypted at all
            with pytest.raises(Unavailable):
                use(kind, server.url, recommend, tls=tls, retries=0)
    finally:
        server.stop()


@both
@pytest.mark.parametrize("where", ["file", "folder"])
def test_the_authorities_of_the_system_are_trusted_where_none_are_named(kind, where, certificates, monkeypatch, tmp_path):
    key, certificate = certificates
    server = GrpcDouble(lambda query: ANSWER, require_callers_certificate(key, certificate))
    (tmp_path / "12345678.0").write_bytes(certificate.read_bytes())
    (tmp_path / "12345678.1").write_text("no certificate")
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate if where == "file" else tmp_path / "none"))
    monkeypatch.setenv("SSL_CERT_DIR", str(tmp_path if where == "folder" else tmp_path / "none"))
    monkeypatch.delenv("GRPC_DEFAULT_SSL_ROOTS_FILE_PATH", raising=False)
    try:
        own = Tls(client_key=key, client_certificate=certificate)
        assert use(kind, server.url, recommend, tls=own, timeouts=Timeouts(10.0, connect=10.0)) == [ANSWER]
    finally:
        server.stop()


def test_wrong_tls_settings_are_refused(certificates, tmp_path):
    key, certificate = certificates
    with pytest.raises(InvalidRequest, match="expected both, or neither"):
        Tls(client_key=key)
    with pytest.raises(InvalidRequest, match="is not a file; expected a PEM file"):
        Tls(tmp_path / "nowhere.pem")
    with pytest.raises(InvalidRequest, match="not encrypted, but tls is set"):
        Recommender("http://localhost:8000", tls=Tls(certificate))
    for tls in (Tls(key), Tls(client_key=certificate, client_certificate=certificate)):
        for url in ("https://localhost:8000", "localhost:8001"):
            with pytest.raises(InvalidRequest, match=r"cannot be used: .* Expected PEM files, and the key of the certificate"):
                Recommender(url, tls=tls)


def test_a_client_key_with_a_password_is_refused_and_not_asked_for(certificates, tmp_path):
    key, certificate = certificates
    locked = tmp_path / "locked.key"
    command = ["openssl", "rsa", "-aes256", "-passout", "pass:secret", "-in", str(key), "-out", str(locked)]
    subprocess.run(command, check=True, capture_output=True)
    with pytest.raises(InvalidRequest, match="the key of the certificate, without a password"):
        Recommender("localhost:8001", tls=Tls(certificate, client_key=locked, client_certificate=certificate))
