"""TLS and mutual TLS of a real tritonserver's gRPC: who is let in, and that commands, client and gateway still reach it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException

from perf.target import serve
from server.generations.activation import activate
from server.start.tls import AUTHORITIES, CALLER, CALLER_KEY, CERTIFICATE, KEY, ServerTls
from server.status.health import read_model_states
from serving.contract.errors import ConfigError
from tests.server.support import toys
from tests.server.support.gateways import USER, served_gateway
from triton_recommender import Recommender, Tls, Unavailable

NAMES = "subjectAltName=DNS:localhost,IP:127.0.0.1"


def openssl(*arguments: object) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)


def make_authority(folder: Path, name: str) -> None:
    """Make <name>.pem, which signs itself, and <name>.key."""
    files = ("-keyout", folder / f"{name}.key", "-out", folder / f"{name}.pem")
    openssl("req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", 2, "-subj", f"/CN={name}", *files)


def make_certificate(folder: Path, authority: str, certificate: str, key: str) -> None:
    """Make a certificate of this machine that an authority signs."""
    request, extensions = folder / "request.csr", folder / "names.ext"
    extensions.write_text(NAMES)
    openssl("req", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=localhost", "-keyout", folder / key, "-out", request)
    signer = ("-CA", folder / f"{authority}.pem", "-CAkey", folder / f"{authority}.key", "-CAcreateserial")
    openssl("x509", "-req", "-in", request, *signer, "-days", 2, "-extfile", extensions, "-out", folder / certificate)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory) -> Path:
    """A folder for mutual TLS, with the pair of a stranger, whom another authority signed."""
    folder = tmp_path_factory.mktemp("certificates")
    for name in ("authorities", "others"):
        make_authority(folder, name)
    make_certificate(folder, "authorities", CERTIFICATE, KEY)
    make_certificate(folder, "authorities", CALLER, CALLER_KEY)
    make_certificate(folder, "others", "stranger.pem", "stranger.key")
    return folder


@pytest.fixture(scope="module")
def one_sided(certificates, tmp_path_factory) -> Path:
    """The same folder without a caller's pair: anybody may ask, over TLS."""
    folder = tmp_path_factory.mktemp("one-sided")
    for name in (CERTIFICATE, KEY, AUTHORITIES):
        shutil.copy(certificates / name, folder)
    return folder


def ask(url: str, **options: object) -> int:
    options = {name: str(value) if isinstance(value, Path) else value for name, value in options.items()}
    with grpcclient.InferenceServerClient(url, **options) as client:
        return toys.ask(client, 7)


def test_over_tls_who_speaks_plainly_or_trusts_another_authority_gets_nothing(repo, launch, certificates, one_sided):
    server = launch(repo, tls=ServerTls(one_sided))
    assert ask(server.grpc_url, ssl=True, root_certificates=one_sided / AUTHORITIES) == toys.expected(7, generation=1)
    with pytest.raises(InferenceServerException):
        ask(server.grpc_url)
    with pytest.raises(InferenceServerException):
        ask(server.grpc_url, ssl=True, root_certificates=certificates / "others.pem")
    with pytest.raises(ConfigError, match="speaks TLS, and load is sent without"), serve(server.grpc_url, repo):
        pass
    toys.publish(repo, 2)
    assert activate(server.grpc_url, repo, 2) == 1  # commands here know the folder


def test_with_mutual_tls_callers_show_a_certificate_of_the_authority(repo, launch, certificates):
    server = launch(repo, tls=ServerTls(certificates))
    trust = {"ssl": True, "root_certificates": certificates / AUTHORITIES}
    caller = {"private_key": certificates / CALLER_KEY, "certificate_chain": certificates / CALLER}
    stranger = {"private_key": certificates / "stranger.key", "certificate_chain": certificates / "stranger.pem"}
    assert ask(server.grpc_url, **trust, **caller) == toys.expected(7, generation=1)
    for refused in ({}, trust, trust | stranger):
        with pytest.raises(InferenceServerException):
            ask(server.grpc_url, **refused)
    assert read_model_states(server.grpc_url)


def test_client_and_gateway_ask_a_server_with_mutual_tls(certificates, tmp_path):
    with served_gateway(tmp_path, ServerTls(certificates)) as served:
        shown = served.recommend()
        assert shown["degraded"] == []
        tls = Tls(certificates / AUTHORITIES, certificates / CALLER_KEY, certificates / CALLER)
        with Recommender(served.server.grpc_url, tls=tls) as recommender:
            assert recommender.recommend(USER).item_ids == tuple(item["id"] for item in shown["items"])
        for refused in (None, Tls(certificates / AUTHORITIES)):
            with Recommender(served.server.grpc_url, tls=refused, retries=0) as recommender, pytest.raises(Unavailable):
                recommender.recommend(USER)


@pytest.mark.parametrize("missing", [CERTIFICATE, KEY, AUTHORITIES, CALLER, CALLER_KEY])
def test_a_folder_that_lacks_a_file_is_refused(certificates, tmp_path, missing):
    folder = shutil.copytree(certificates, tmp_path / "folder")
    (folder / missing).unlink()
    with pytest.raises(ConfigError, match=f"has no {missing}; TLS needs certificate.pem, key.pem, authorities.pem"):
        ServerTls(folder)


@pytest.mark.parametrize(
    ("broken", "named"),
    [
        (AUTHORITIES, f"{AUTHORITIES} in "),
        (CERTIFICATE, f"{CERTIFICATE} with {KEY} in "),
        (KEY, f"{CERTIFICATE} with {KEY} in "),
        (CALLER_KEY, f"{CALLER} with {CALLER_KEY} in "),
    ],
)
def test_a_file_that_tls_cannot_use_is_named_before_the_server_starts(repo, launch, certificates, tmp_path, broken, named):
    folder = shutil.copytree(certificates, tmp_path / "folder")
    (folder / broken).write_text("no PEM")
    with pytest.raises(ConfigError, match=rf"^{named}.* cannot be used: .* Expected PEM files"):
        launch(repo, tls=ServerTls(folder))
