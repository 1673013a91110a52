"""Record the servers started here, one file each under .run/servers/, so that other commands can find and stop them."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from server.start.lock import make_lock_folder
from server.start.ports import LOOPBACK, Ports, choose_reachable_host
from serving.contract.errors import ConfigError
from serving.contract.locks import hold_lock


@dataclass(frozen=True)
class ServerState:
    """One server that was started.

    tag: text on the command lines of the server, its stubs and helpers, and of no other process
    settings: its options, by the names of `python -m server start`, and the address of its gateway, `gateway_url`
    content: SHA-256 of the manifest of the served generation, "" without one
    generation: the served one, 0 when unknown
    fault: why its supervisor took it out of service, "" while it serves
    owner: the process that stops it when it ends (processes.py::identity), "" for a server that outlives its starter
    """

    pid: int
    tag: str
    repo: Path
    log: Path
    ports: Ports
    settings: dict[str, int | bool | str] = field(default_factory=dict)
    content: str = ""
    owner: str = ""
    generation: int = 0
    fault: str = ""

    @property
    def grpc_url(self) -> str:
        return f"{self.host}:{self.ports.grpc}"

    @property
    def host(self) -> str:
        """The host at which this machine reaches the server."""
        return choose_reachable_host(str(self.settings.get("host", LOOPBACK)))

    def save(self, run_dir: Path) -> None:
        """Write the state file, as a whole."""
        with _hold_state_lock(run_dir, self.ports.grpc) as path:
            self._write(path)

    def change(self, run_dir: Path, **changes: Any) -> ServerState:
        """Change fields of the saved state, and keep what another process has saved in the others. Return the new state.

        Nothing is saved for a server that was stopped or replaced meanwhile.
        """
        with _hold_state_lock(run_dir, self.ports.grpc) as path:
            saved = read_state(path)
            if saved is None or saved.tag != self.tag:
                return replace(self, **changes)
            changed = replace(saved, **changes)
            changed._write(path)
        return changed

    def _write(self, path: Path) -> None:
        fields = asdict(self) | {"repo": str(self.repo), "log": str(self.log)}
        temporary = path.with_suffix(f".{os.getpid()}.tmp")
        temporary.write_text(json.dumps(fields, indent=1))
        temporary.replace(path)

    def forget(self, run_dir: Path) -> None:
        """Remove the state file, unless another server has the port by now."""
        with _hold_state_lock(run_dir, self.ports.grpc) as path:
            saved = read_state(path)
            if saved is None or saved.tag == self.tag:
                path.unlink(missing_ok=True)


@contextlib.contextmanager
def _hold_state_lock(run_dir: Path, grpc_port: int) -> Iterator[Path]:
    """Hold a lock on a state file, which a command and the supervisor may change at the same time. Yield the file's path."""
    path = make_state_path(run_dir, grpc_port)
    path.parent.mkdir(parents=True, exist_ok=True)
    with hold_lock(make_lock_folder(run_dir) / f"{grpc_port}.lock"):
        yield path


def make_state_path(run_dir: Path, grpc_port: int) -> Path:
    return run_dir / "servers" / f"{grpc_port}.json"


def read_state(path: Path) -> ServerState | None:
    """Return the state in a file; None when it is missing or unusable."""
    try:
        fields = json.loads(path.read_text())
        ports, settings = Ports(**fields["ports"]), dict(fields.get("settings", {}))
        more: dict[str, Any] = {name: str(fields.get(name, "")) for name in ("content", "owner", "fault")}
        more["generation"] = int(fields.get("generation", 0))
        repo, log = Path(fields["repo"]), Path(fields["log"])
        state = ServerState(int(fields["pid"]), str(fields["tag"]), repo, log, ports, settings, **more)
    except (OSError, ValueError, KeyError, TypeError, ConfigError):
        return None
    return state if state.pid > 0 and state.tag else None  # an empty tag would match every process


def read_known_servers(run_dir: Path) -> list[ServerState]:
    """Return the servers with a readable state file, sorted by gRPC port, running or not."""
    states = [read_state(path) for path in _list_state_files(run_dir)]
    return sorted((state for state in states if state is not None), key=lambda state: state.ports.grpc)


def find_unreadable_states(run_dir: Path) -> list[Path]:
    """Return the state files that cannot be read: edited by hand, or damaged."""
    return [path for path in _list_state_files(run_dir) if read_state(path) is None]


def _list_state_files(run_dir: Path) -> list[Path]:
    return sorted((run_dir / "servers").glob("*.json"))
