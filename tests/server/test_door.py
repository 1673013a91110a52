"""A stranger at the ports of a real server: what could run code, end it or silence it is refused without its key."""

from __future__ import annotations

import base64
import json
import socket
import stat
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException

from server import keys
from server.launcher import TritonServer
from server.start.environment import PROJECT
from server.status.condition import examine
from server.status.health import open_local_client
from tests.server.support import toys

CODE = b"import os\nos.mknod('/tmp/a-stranger-was-here')\n"
UPLOAD = {
    "parameters": {
        "config": json.dumps({"name": "first", "backend": "python"}),
        "file:1/model.py": base64.b64encode(CODE).decode(),
    }
}
REGION = {"key": "/triton_python_region", "offset": 0, "byte_size": 64}


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[TritonServer]:
    folder = tmp_path_factory.mktemp("door")
    with TritonServer(toys.publish(folder / "repo", 1), run_dir=folder / "run", ready_timeout_s=300.0) as server:
        yield server


def post(server: TritonServer, path: str, body: dict | None, **headers: str) -> int:
    """Return the HTTP status. body: that of a POST, None for a GET"""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"http://{server.http_url}/v2/{path}", data, headers)
    try:
        with urllib.request.urlopen(request, timeout=10) as reply:
            return reply.status
    except urllib.error.HTTPError as error:
        return error.code


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("repository/models/first/load", UPLOAD),
        ("repository/models/stranger/load", UPLOAD),
        ("repository/models/recommend/unload", {"parameters": {"unload_dependents": True}}),
        ("repository/index", {}),
        ("systemsharedmemory/region/any/register", REGION),
        ("systemsharedmemory/unregister", {}),
        ("systemsharedmemory/status", None),
        ("cudasharedmemory/region/any/register", {"raw_handle": {"b64": ""}, "device_id": 0, "byte_size": 64}),
        ("logging", {"log_error": False, "log_file": "/tmp/a-strangers-log"}),
        ("trace/setting", {"trace_level": ["TENSORS"], "trace_rate": "1", "trace_file": "/tmp/a-strangers-trace"}),
        ("models/recommend/trace/setting", {"trace_level": ["TENSORS"]}),
        ("models/stats", None),
        ("models/recommend/stats", None),
        ("models/recommend/versions/1/stats", None),
    ],
)
def test_a_stranger_is_refused_over_http(server, path, body):
    assert post(server, path, body) == 403
    assert post(server, path, body, **{keys.HEADER: "guessed"}) == 403
    assert post(server, path, body, **{keys.GRPC_HEADER: keys.find_key(server.grpc_url)}) == 403  # gRPC's header is not HTTP's


GRPC_CALLS = {
    "load": lambda client: client.load_model("first", config=UPLOAD["parameters"]["config"], files={"file:1/model.py": CODE}),
    "unload": lambda client: client.unload_model("recommend", unload_dependents=True),
    "index": lambda client: client.get_model_repository_index(),
    "register": lambda client: client.register_system_shared_memory("any", REGION["key"], 64),
    "unregister": lambda client: client.unregister_system_shared_memory(),
    "register on a GPU": lambda client: client.register_cuda_shared_memory("any", b"", 0, 64),
    "regions": lambda client: client.get_system_shared_memory_status(),
    "silence the log": lambda client: client.update_log_settings({"log_error": False}),
    "trace": lambda client: client.update_trace_settings("recommend", {"trace_level": ["TENSORS"]}),
    "statistics": lambda client: client.get_inference_statistics(),
}


@pytest.mark.parametrize("call", GRPC_CALLS.values(), ids=GRPC_CALLS.keys())
def test_a_stranger_is_refused_over_grpc(server, call):
    with grpcclient.InferenceServerClient(server.grpc_url) as client:
        with pytest.raises(InferenceServerException, match="protocol is restricted"):
            call(client)
        assert toys.ask(client, 7) == toys.expected(7, generation=1)


def test_the_key_opens_what_is_closed(server):
    key = {keys.HEADER: keys.find_key(server.grpc_url)}
    assert post(server, "repository/index", {}, **key) == 200
    assert post(server, "models/stats", None, **key) == 200
    assert post(server, "logging", None, **key) == 200
    assert post(server, "trace/setting", None, **key) == 200
    assert post(server, "systemsharedmemory/status", None, **key) == 200
    assert post(server, "repository/models/first/load", {}, **key) == 200
    with open_local_client(server.grpc_url) as client:
        client.load_model("first")
        assert client.get_inference_statistics("first").model_stats[0].version == "1"
        assert client.get_log_settings(as_json=True)["settings"]
        assert client.get_system_shared_memory_status().regions == {}
        assert toys.ask(client, 7) == toys.expected(7, generation=1)


def test_the_key_is_on_no_command_line_in_no_log_and_in_a_file_of_its_owner(server):
    key = keys.find_key(server.grpc_url)
    assert len(key) == 64
    for process in psutil.process_iter():
        assert key not in Path(f"/proc/{process.pid}/cmdline").read_text(errors="replace"), process
    assert key not in server.log_path.read_text()
    (path,) = [path for path in keys.KEYS_DIR.iterdir() if key in path.read_text()]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(Path(f"/proc/{server.state.pid}/environ").stat().st_mode) == 0o400
    assert key not in (server.run_dir / "servers" / f"{server.ports.grpc}.json").read_text()


def test_the_key_is_on_no_command_line_while_the_server_starts(repo, launch, tmp_path):
    """A stranger who reads every command line, all the time, sees `[hidden]` at every moment of the start."""
    spy = (
        "import os, sys\nseen = set()\nwhile not os.path.exists(sys.argv[1]):\n"
        "  for pid in filter(str.isdigit, os.listdir('/proc')):\n"
        "    try: line = open(f'/proc/{pid}/cmdline').read()\n"
        "    except OSError: continue\n"
        "    seen |= {line} if sys.argv[2] in line and int(pid) != os.getpid() else set()\n"
        "print(*seen, sep='\\n')"
    )
    end, marker = tmp_path / "end", str(repo)
    process = subprocess.Popen([sys.executable, "-c", spy, str(end), marker], stdout=subprocess.PIPE, text=True)
    server = launch(repo)
    end.touch()
    seen, _ = process.communicate(timeout=30)
    assert f"--model-repository={repo}" in seen
    assert "[hidden]" in seen
    assert keys.RESTRICTED not in seen
    assert keys.find_key(server.grpc_url) not in seen


def test_every_server_has_a_key_of_its_own_which_ends_with_it(repo, launch, server):
    """Also one without HTTP, which answers over gRPC."""
    another = launch(repo, http=False)
    assert not opens("127.0.0.1", another.ports.http)
    assert opens("127.0.0.1", another.ports.metrics)
    key = keys.find_key(another.grpc_url)
    assert key != keys.find_key(server.grpc_url)
    with grpcclient.InferenceServerClient(another.grpc_url) as client:
        with pytest.raises(InferenceServerException, match="protocol is restricted"):
            client.get_model_repository_index(headers={keys.GRPC_HEADER: keys.find_key(server.grpc_url)})
        assert client.get_model_repository_index(headers={keys.GRPC_HEADER: key}).models
        assert toys.ask(client, 7) == toys.expected(7, generation=1)
    another.stop()
    assert keys.find_key(another.grpc_url) == ""


def own_address() -> str:
    """This machine's address for others."""
    for addresses in psutil.net_if_addrs().values():
        for address in addresses:
            if address.family == socket.AF_INET and not address.address.startswith("127."):
                return address.address
    pytest.skip("this machine has no address but loopback")


def opens(address: str, port: int) -> bool:
    try:
        socket.create_connection((address, port), timeout=2).close()
    except OSError:
        return False
    return True


def test_nobody_reaches_a_port_over_the_network_unless_the_server_was_opened(server, repo, launch):
    ports = [server.ports.grpc, server.ports.http, server.ports.metrics]
    address = own_address()
    assert [opens("127.0.0.1", port) for port in ports] == [True] * 3
    assert [opens(address, port) for port in ports] == [False] * 3
    opened = launch(repo, host="0.0.0.0")
    ports = [opened.ports.grpc, opened.ports.http, opened.ports.metrics]
    assert [opens(address, port) for port in ports] == [True] * 3
    with grpcclient.InferenceServerClient(f"{address}:{opened.ports.grpc}") as stranger:
        assert toys.ask(stranger, 7) == toys.expected(7, generation=1)
        with pytest.raises(InferenceServerException, match="protocol is restricted"):
            stranger.unload_model("recommend")
    assert examine(opened.grpc_url, opened.state).fault == ""


def test_latency_quantiles_are_on_the_metrics_page(server):
    with grpcclient.InferenceServerClient(server.grpc_url) as client:
        toys.ask(client, 7)
    page = urllib.request.urlopen(server.metrics_url, timeout=10).read().decode()
    for model in ("recommend", "first"):
        for quantile in ("0.5", "0.95", "0.99"):
            assert f'nv_inference_request_summary_us{{model="{model}",version="1",quantile="{quantile}"}}' in page


FORBIDS_TRACING = """
import ctypes, os, struct, sys
from server.start.private_arguments import start_privately
# seccomp: load the system call's number; ptrace is refused with EPERM, all others are let through (x86-64)
program = b"".join(struct.pack("<HBBI", *line) for line in
                   [(0x20, 0, 0, 0), (0x15, 0, 1, 101), (0x06, 0, 0, 0x50001), (0x06, 0, 0, 0x7FFF0000)])
buffer = ctypes.create_string_buffer(program)
libc = ctypes.CDLL(None)
assert libc.prctl(38, 1, 0, 0, 0) == 0 and libc.prctl(22, 2, struct.pack("<HxxxxxxQ", 4, ctypes.addressof(buffer)), 0, 0) == 0
sys.exit(start_privately(["/bin/sh", "-c", "echo $1", "sh"], ["--key=secret"], os.environ).wait())
"""


def test_where_the_kernel_forbids_tracing_the_server_starts_and_says_that_its_key_can_be_read():
    run = subprocess.run([sys.executable, "-c", FORBIDS_TRACING], cwd=PROJECT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout == "--key=secret\n"
    assert run.stderr.startswith("warning: every user of this machine can read the server's key in the command line of /bin/sh")
