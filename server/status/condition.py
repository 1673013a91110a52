"""Examine a server: why it ended, or whether it answers a real request."""

from __future__ import annotations

import contextlib
import re
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread

import numpy as np
import psutil
import tritonclient.grpc as grpcclient
from tritonclient.grpc import model_config_pb2
from tritonclient.utils import InferenceServerException, triton_to_np_dtype

from repository.applied_rules import find_rules_folder
from repository.experiments import find_running
from server.keys import KEYS_DIR
from server.processes import count_lost_stubs, find_server_members, is_running
from server.state import ServerState
from server.status.clock import describe_wrong_clock
from server.status.health import describe_unready, open_local_client, read_model_states
from server.status.log import explain_end
from serving.contract.artifacts import find_stage_folder, make_stage_settings, read_stage
from serving.contract.errors import ArtifactError, RecommenderError, ServerError
from serving.contract.generations import read_pinned_generation
from serving.contract.tensors import ENSEMBLE, OBSERVE, PROBE_USER_ID, USER_ID
from serving.live.store import DATA_FILE
from serving.stages.live.models import LiveSettings

QUESTION_TIMEOUT_S = 3.0
LATE_S = 10.0  # a server that has not answered a request so long after its time hangs: the request is cancelled
NETWORK_FILE_SYSTEMS = ("nfs", "nfs4", "cifs", "smb3", "ceph", "lustre", "beegfs", "fuse.glusterfs", "fuse.sshfs")
LEAST_FREE_BYTES = 256 << 20  # on the disk of the live store
MAPPED_STORE = re.compile(rf" (/.*/{re.escape(DATA_FILE)}(?: \(deleted\))?)$", re.MULTILINE)  # in what a process has mapped


@dataclass(frozen=True)
class Condition:
    """State of a server. fault: why it does not answer, "" when it does; facts: generation and models, "" when unknown"""

    fault: str = ""
    facts: str = ""

    def __str__(self) -> str:
        return "; ".join(part for part in (self.fault or "ready", self.facts) if part)


def examine(grpc_url: str, state: ServerState | None) -> Condition:
    """Examine a server. state: that of a server started here, None for another server"""
    if state is not None and state.fault:
        return Condition(f"{state.fault}, so its supervisor took it out of service")
    if state is not None and not is_running(state.pid, state.tag):
        return Condition(explain_end(state.log.read_text(errors="replace")) if state.log.exists() else "its process is gone")
    try:
        states = read_model_states(grpc_url)
        lost_key = ""
    except ServerError:  # not started here, or its key is lost: only its answer shows whether it is ready
        states = {}
        lost_key = (
            f"its key is not in {KEYS_DIR}, so nobody can move it to another generation or begin an experiment (restart it: "
            "make stop, then make serve)"
        )
    if states is None:
        starts = "its process runs, but nothing answers there: it is starting, or it hangs"
        return Condition(starts if state is not None else describe_unready(None))
    warnings = (lost_key, *_list_warnings(state)) if state else ()
    facts = ", ".join(filter(None, (_describe_models(states), *warnings)))
    if state is not None and (n_lost_stubs := count_lost_stubs(state.pid)):
        return Condition(
            f"{n_lost_stubs} of its Python model process(es) died (killed, crashed, or out of memory), so requests fail", facts
        )
    if states and (unready := describe_unready(states)):
        return Condition(unready, facts)
    started_s = time.monotonic()
    try:
        ask(grpc_url)
    except ServerError as error:
        return Condition(str(error), facts)
    latency = f"{ENSEMBLE} answered in {1000 * (time.monotonic() - started_s):.0f} ms"
    return Condition("", ", ".join(part for part in (latency, facts) if part))


def _list_warnings(state: ServerState) -> tuple[str, ...]:
    warnings = describe_other_pin(state), describe_removed_store(state), describe_full_disk(state.repo)
    return *warnings, *list_start_warnings(state.repo)


def list_start_warnings(repo: Path) -> list[str]:
    """Return what a server on a repository will suffer from, as messages."""
    return list(filter(None, (describe_network_disk(repo), describe_wrong_clock(repo), describe_unknown_settings(repo))))


def describe_network_disk(repo: Path) -> str:
    """Return a message if a repository's live store is on a network file system; "" otherwise, and where it has none."""
    try:
        folder = find_rules_folder(repo).parent
    except (ArtifactError, OSError):
        return ""
    if not (repo / OBSERVE).is_dir():  # it takes no events
        return ""
    mounts = [mount for mount in psutil.disk_partitions(all=True) if folder.is_relative_to(mount.mountpoint)]
    kind = max(mounts, key=lambda mount: len(mount.mountpoint)).fstype if mounts else ""
    if kind not in NETWORK_FILE_SYSTEMS:
        return ""
    return (
        f"the live store {folder} is on a network file system ({kind}), where two machines that use it damage it: export with "
        "[live] folder on a disk of this machine"
    )


def describe_unknown_settings(repo: Path) -> str:
    """Return a message if the live settings are of another version of this project; "" otherwise, and where there are none."""
    try:
        folder = find_stage_folder(repo, OBSERVE, read_pinned_generation(repo))
        if folder.is_dir():
            make_stage_settings(folder, read_stage(folder), LiveSettings)
    except ArtifactError as error:
        return f"the live store is not maintained, and no events come from Kafka or go to Redis, because {error}"
    return ""


def describe_other_pin(state: ServerState) -> str:
    """Return a message if a repository is pinned to another generation than its server serves; "" otherwise.

    Also where the pin cannot be read.
    """
    try:
        pinned = read_pinned_generation(state.repo)
        if pinned == state.generation or not state.generation:
            return ""
        running = find_running(state.repo)
    except (RecommenderError, OSError):  # what checks the files says why
        return ""
    warning = f"WARNING: generation {pinned} is pinned, and generation {state.generation} is served"
    if running:  # no server moves meanwhile
        return (
            f"{warning}. A restart would serve {pinned}, and end experiment {running.name} (keep it: "
            f"python -m export pin {state.generation} --repo {state.repo})"
        )
    return f"{warning} (move the server: python -m server activate --generation {pinned} --grpc-port {state.ports.grpc})"


def describe_removed_store(state: ServerState) -> str:
    """Return a message if a server has a live store open that was removed or moved since; "" otherwise.

    For a moment after a move to another data set, the former generation still has the store open that was set aside.
    """
    try:
        folder = find_rules_folder(state.repo).parent.resolve()
    except (ArtifactError, OSError):
        return ""
    place = folder / DATA_FILE
    for process in find_server_members(state.tag):
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            for path in MAPPED_STORE.findall(Path(f"/proc/{process.pid}/maps").read_text(errors="replace")):
                if path.endswith("(deleted)"):
                    return (
                        "its live store was removed, so events are refused (docs/operating.md: put a backup back, if there is "
                        "one, and restart the server)"
                    )
                is_set_aside = place.exists() and Path(path).parent.name.startswith(f"{folder.name}.")
                if path != str(place) and not is_set_aside:
                    return f"its live store was moved to {path}, so events are refused (move it back, and restart the server)"
    return ""


def describe_full_disk(repo: Path) -> str:
    """Return a message if the disk of a repository's live store is nearly full; "" otherwise, and where no store is found."""
    try:
        folder = find_rules_folder(repo).parent
        free_bytes = shutil.disk_usage(folder).free
    except (ArtifactError, OSError):  # OSError: there is none yet, or this user may not see it
        return ""
    if free_bytes > LEAST_FREE_BYTES:
        return ""
    return f"only {free_bytes >> 20} MiB are free on the disk of the live store {folder}, which refuses events once it is full"


def ask(grpc_url: str, timeout_s: float = QUESTION_TIMEOUT_S) -> None:
    """Send one real request, of a user who does not exist. Raises ServerError unless it is answered in time.

    A late one is left alone for LATE_S more, because cancelled calls can crash tritonserver 2.51 (docs/serving.md).
    """
    outcomes: SimpleQueue[Exception | None] = SimpleQueue()
    Thread(target=_send_request, args=(grpc_url, timeout_s + LATE_S, outcomes), daemon=True).start()
    try:
        error = outcomes.get(timeout=timeout_s)
    except Empty:
        error = InferenceServerException("Deadline Exceeded")
    if isinstance(error, InferenceServerException):
        message = (error.message() or "").partition("\n")[0]
        raise ServerError(f"{ENSEMBLE} does not answer a request within {timeout_s:g} s: {message}") from error
    if error is not None:
        raise error


def _send_request(grpc_url: str, timeout_s: float, outcomes: SimpleQueue[Exception | None]) -> None:
    """Send one request. Put None into `outcomes` when it is answered, and the error when it fails."""
    try:
        with open_local_client(grpc_url) as client:
            config = client.get_model_config(ENSEMBLE, client_timeout=timeout_s).config
            inputs = [_make_input(tensor, config.max_batch_size > 0) for tensor in config.input if not tensor.optional]
            client.infer(ENSEMBLE, inputs, client_timeout=timeout_s)
    except Exception as error:  # every error: the caller raises it
        outcomes.put(error)
    else:
        outcomes.put(None)


def _make_input(tensor: model_config_pb2.ModelInput, batched: bool) -> grpcclient.InferInput:
    name = model_config_pb2.DataType.Name(tensor.data_type).removeprefix("TYPE_")
    dtype = "BYTES" if name == "STRING" else name
    shape = [1] * batched + [max(size, 1) for size in tensor.dims]
    fill = PROBE_USER_ID if tensor.name == USER_ID.name else 0
    array = np.full(shape, b"", object) if dtype == "BYTES" else np.full(shape, fill, triton_to_np_dtype(dtype))
    return grpcclient.InferInput(tensor.name, shape, dtype).set_data_from_numpy(array)


def _describe_models(states: dict[tuple[str, int], tuple[str, str]]) -> str:
    """Return the served generation and the ready models, as a message."""
    ready = {name for (name, _), (state, _) in states.items() if state == "READY"}
    generations = [version for (name, version), (state, _) in states.items() if name == ENSEMBLE and state == "READY"]
    models = [f"{name} {'ready' if name in ready else 'NOT READY'}" for name in dict.fromkeys(name for name, _ in states)]
    return ", ".join([f"generation {version}" for version in generations] + models)
