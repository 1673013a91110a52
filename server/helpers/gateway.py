"""Start and stop the gateway of a server (`python -m gateway`), under a supervisor that restarts it when it ends.

Gateway and supervisor carry the server's tag, and are stopped with the server.
"""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import psutil

from server import processes
from server.start.ports import is_free
from server.start.tls import ServerTls
from server.state import ServerState, make_state_path
from server.supervised import start_supervised, wait_for_start
from serving.contract.errors import ServerError

MODULE = "gateway"
START_TIMEOUT_S = 30.0
STOPPED = (-signal.SIGTERM, 128 + signal.SIGTERM, -signal.SIGKILL)  # exit codes of a supervisor that was told to end
LISTENS = "listens at "  # the gateway's line with its address, when it is ready


class ServerStopped(ServerError):
    """The server was stopped while its gateway started, so nothing may start it again."""


def follow(state: ServerState, port: int, config: str, run_dir: Path, keep_port: bool = False) -> ServerState:
    """Start a gateway at `port` unless it runs already. Return the server's state, as saved, with the gateway's address.

    Raises ServerError, as ServerStopped where the server was stopped meanwhile.
    config: path of the gateway's own settings, a TOML file; "" for the defaults
    keep_port: whether a gateway that runs stays at its own port, where callers expect it
    """
    runs = "gateway_url" in state.settings and bool(list_gateways(state.tag))
    if keep_port and runs:
        port = int(state.settings["gateway_port"])
    settings: dict[str, int | bool | str] = {"gateway_port": port, "gateway_config": config}
    is_same = all(state.settings.get(name) == value for name, value in settings.items())
    if is_same and runs:
        return state
    moves = runs and port != state.settings["gateway_port"]
    if not moves:
        stop(state.tag)
    if not is_free(port):
        outcome = f"its gateway stays at {state.settings['gateway_url']}" if moves else "has no gateway"
        raise ServerError(
            f"The server answers, but {outcome}: port {port} is taken. Stop what listens there, or choose another port: "
            "make serve GATEWAY_PORT=…"
        )
    stop(state.tag)
    process, log_path = _start(state, port, config, run_dir)
    last_line = wait_for_start(process, log_path, LISTENS, START_TIMEOUT_S)
    if process.poll() in STOPPED or not make_state_path(run_dir, state.ports.grpc).exists():
        stop(state.tag)
        raise ServerStopped("The server was stopped while its gateway started (as of `make stop`). Start it again.")
    if last_line:
        stop(state.tag)
        reason = last_line.removeprefix("error: ").rstrip(".")
        if not runs:
            raise ServerError(f"The server answers, but its gateway does not start: {reason}. Whole log: {log_path}.")
        outcome = f"It is started again as it was, at {state.settings['gateway_url']}."
        process, log_path = _start(state, int(state.settings["gateway_port"]), str(state.settings["gateway_config"]), run_dir)
        if wait_for_start(process, log_path, LISTENS, START_TIMEOUT_S):
            stop(state.tag)
            outcome = f"Nor does it start as it was, so there is no gateway now. Correct the settings; its log is {log_path}."
        raise ServerError(f"The gateway does not start as asked: {reason}. {outcome}")
    url = log_path.read_text(errors="replace").rpartition(LISTENS)[2].split('"')[0]
    return state.change(run_dir, settings=state.settings | settings | {"gateway_url": url})


def list_gateways(tag: str) -> list[psutil.Process]:
    """Return the processes of a server's gateway: itself and its supervisor."""
    return processes.find_running(tag, MODULE)


def stop(tag: str) -> None:
    """Stop the gateway of a server, if it has one."""
    processes.terminate(list_gateways(tag))


def _start(state: ServerState, port: int, config: str, run_dir: Path) -> tuple[subprocess.Popen, Path]:
    log_path = run_dir / "logs" / f"gateway-{port}.log"
    options = ["--repo", str(state.repo), "--server", state.grpc_url, "--port", str(port), "--tag", state.tag]
    options += ["--config", config] if config else []
    options += ServerTls(Path(str(folder))).gateway_options if (folder := state.settings.get("tls")) else []
    return start_supervised(log_path, ["-m", MODULE, "serve", *options]), log_path
