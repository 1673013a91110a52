"""The gateway of a running server (`python -m gateway`): a child that a supervisor starts again when it ends.

Both carry the server's tag, and end with it.
"""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil

from server import log, processes, supervisor
from server.environment import PROJECT
from server.ports import is_free
from server.state import ServerState
from server.tls import ServerTls
from server.updaters import stop as stop_all
from serving.contract.errors import ServerError

MODULE = "gateway"
START_TIMEOUT_S = 30.0
POLL_S = 0.05
LISTENS = "listens at"  # its message when it is ready


def follow(state: ServerState, port: int, config: str, run_dir: Path) -> ServerState:
    """Start a gateway at `port` unless it is running. Return the saved state. Raises ServerError.

    config: the gateway's own settings, a TOML file; "" for the defaults
    """
    wanted: dict[str, int | bool | str] = {"gateway_port": port, "gateway_config": config}
    if gateways(state.tag) and all(state.settings.get(name) == value for name, value in wanted.items()):
        return state
    stop(state.tag)
    if not is_free(port):
        raise ServerError(
            f"The server answers, but has no gateway: port {port} is taken. Stop what listens there, or choose another: "
            "make serve GATEWAY_PORT=…"
        )
    process, log_path = _start(state, port, config, run_dir)
    deadline = time.monotonic() + START_TIMEOUT_S
    while LISTENS not in (printed := log_path.read_text(errors="replace")):
        if process.poll() is not None or supervisor.REMARK in printed or time.monotonic() > deadline:
            stop(state.tag)
            lines = [line for line in printed.splitlines() if line.strip() and not line.startswith(supervisor.REMARK)]
            said = lines[-1] if lines else "nothing"
            raise ServerError(f"The server answers, but its gateway does not start: {said}. Whole log: {log_path}.")
        time.sleep(POLL_S)
    state = replace(state, settings=state.settings | wanted)
    state.save(run_dir)
    return state


def gateways(tag: str) -> list[psutil.Process]:
    """Return the gateway of a server and its supervisor."""
    return [process for process in processes.members(tag) if processes.runs_module(process, MODULE)]


def stop(tag: str) -> None:
    """End the gateway of a server, when it has one."""
    stop_all(gateways(tag))


def _start(state: ServerState, port: int, config: str, run_dir: Path) -> tuple[subprocess.Popen, Path]:
    log_path = run_dir / "logs" / f"gateway-{port}.log"
    log_path.parent.mkdir(parents=True, exist_ok=True)
    options = ["--repo", str(state.repo), "--server", state.grpc_url, "--port", str(port), "--tag", state.tag]
    options += ["--config", config] if config else []
    options += ServerTls(Path(str(folder))).gateway_options() if (folder := state.settings.get("tls")) else []
    log.rotate(log_path)
    with log_path.open("wb") as log_file:
        process = subprocess.Popen(
            [sys.executable, "-m", supervisor.__name__, str(PROJECT), sys.executable, "-m", MODULE, "serve", *options],
            cwd=PROJECT,
            stdin=subprocess.DEVNULL,
            stdout=log_file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return process, log_path
