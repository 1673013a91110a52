"""TLS and mutual TLS of the gateway, over a real socket."""

from __future__ import annotations

import contextlib
import socket
import ssl
from pathlib import Path

import httpx
import pytest

from gateway.edge import protocol
from gateway.settings import GatewaySettings, read_settings
from serving.contract.errors import ConfigError
from tests.certificates import make_certificate
from tests.unit.gateway.sockets import listening

SILENT_S = 30.0  # far above what a connection takes: the machine that runs the tests may be slow


@pytest.fixture(scope="module")
def certificates(tmp_path_factory) -> Path:
    """A folder with two certificates that sign themselves, of the gateway and of a caller."""
    folder = tmp_path_factory.mktemp("certificates")
    for name in ("gateway", "caller"):
        make_certificate(folder, name)
    return folder


def trusting(certificates: Path, caller: str = "") -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(certificates / "gateway.pem"))
    if caller:
        context.load_cert_chain(certificates / f"{caller}.pem", certificates / f"{caller}.key")
    return context


def test_a_gateway_with_a_certificate_speaks_https_alone(gateway, certificates, caplog):
    own = {"certificate": certificates / "gateway.pem", "key": certificates / "gateway.key"}
    with listening(gateway().app, GatewaySettings(**own)) as address:
        assert httpx.get(f"https://{address}/healthz", verify=trusting(certificates)).status_code == 200
        with pytest.raises(httpx.TransportError):
            httpx.get(f"https://{address}/healthz")  # a certificate that nobody vouches for
        with pytest.raises(httpx.TransportError):
            httpx.get(f"http://{address}/healthz")
    assert not [record for record in caplog.records if record.name != "httpx"]  # strangers could fill the disk


def test_callers_show_a_certificate_where_the_gateway_asks_for_it(gateway, certificates):
    own = {"certificate": certificates / "gateway.pem", "key": certificates / "gateway.key"}
    with listening(gateway().app, GatewaySettings(**own, client_authorities=certificates / "caller.pem")) as address:
        url = f"https://{address}/healthz"
        assert httpx.get(url, verify=trusting(certificates, "caller")).status_code == 200
        for context in (trusting(certificates), trusting(certificates, "gateway")):
            with pytest.raises(httpx.TransportError):
                httpx.get(url, verify=context)


def connect(address: str) -> socket.socket:
    host, _, port = address.partition(":")
    return socket.create_connection((host, int(port)), timeout=SILENT_S)


def is_cut_off(caller: socket.socket) -> bool:
    with contextlib.suppress(ConnectionError):
        return caller.recv(1) == b""
    return True


def test_callers_who_never_begin_tls_make_room_for_those_who_do(gateway, certificates, monkeypatch, caplog):
    most = 4
    monkeypatch.setattr(protocol, "MOST_CONNECTIONS", most)
    own = {"certificate": certificates / "gateway.pem", "key": certificates / "gateway.key"}
    app, settings = gateway().app, GatewaySettings(**own, header_timeout_s=2 * SILENT_S)
    with listening(app, settings) as address, contextlib.ExitStack() as open_ones:
        silent = [open_ones.enter_context(connect(address)) for _ in range(3 * most)]
        assert all(map(is_cut_off, silent[:-most]))
        assert httpx.get(f"https://{address}/healthz", verify=trusting(certificates), timeout=SILENT_S).status_code == 200
    assert not [record for record in caplog.records if record.name != "httpx"]


def test_a_caller_who_never_begins_tls_is_cut_off_by_time(gateway, certificates):
    own = {"certificate": certificates / "gateway.pem", "key": certificates / "gateway.key"}
    with listening(gateway().app, GatewaySettings(**own, header_timeout_s=0.5)) as address, connect(address) as caller:
        assert is_cut_off(caller)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("certificate = 'gateway.pem'", "one of certificate and key is set"),
        ("client_authorities = 'caller.pem'", "client_authorities is set without certificate and key"),
        ("certificate = 'absent.pem'", r"absent\.pem, which is no file"),
    ],
)
def test_half_a_certificate_is_refused(certificates, text, said):
    path = certificates / "gateway.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=said):
        read_settings(path)


@pytest.mark.parametrize(
    ("text", "given", "expected"),
    [
        ("", ["certificate", "key"], {"certificate": "option", "key": "option"}),
        ("", ["authorities"], {"authorities": "option"}),
        ("authorities", ["certificate", "key"], {"authorities": "file", "certificate": "option", "key": "option"}),
        ("certificate key", ["authorities"], {"authorities": "option", "certificate": "file", "key": "file"}),
        ("authorities", ["authorities"], {"authorities": "file"}),
    ],
)
def test_options_name_the_tls_files_that_the_settings_leave_out(tmp_path, text, given, expected):
    (tmp_path / "file.pem").touch()
    (tmp_path / "gateway.toml").write_text("".join(f"server_{name} = 'file.pem'\n" for name in text.split()))
    settings = read_settings(tmp_path / "gateway.toml", **{f"server_{name}": tmp_path / "option.pem" for name in given})
    files = {name: getattr(settings, f"server_{name}") for name in ("authorities", "certificate", "key")}
    assert {name: path.stem for name, path in files.items() if path} == expected
