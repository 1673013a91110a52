"""Find the faults of a running server for which it needs a restart: it ended, lost a model's process, was paused, or hangs."""

from __future__ import annotations

import time

import psutil

from server import processes
from server.state import ServerState
from server.status import log
from server.status.condition import ask
from server.status.health import open_local_client
from serving.contract.errors import ServerError
from serving.contract.tensors import ENSEMBLE

PAUSED_S = 1.0  # a stub that is paused for longer and then continues under load makes tritonserver 2.51 abort
ASK_EVERY_S, ASK_TIMEOUT_S = 2.0, 1.0
HANGS_S = 10.0  # without an answer to the supervisor's requests or to any other
SCAN_EVERY_S = 5.0  # for gateways, experiments, and the stubs of a newly activated generation


class Observer:
    """Finds the faults of one server process."""

    def __init__(self, state: ServerState) -> None:
        now_s = time.monotonic()
        self._state = state
        self._members: list[psutil.Process] = []
        self._scanned_s = self._asked_s = float("-inf")
        self._paused_since_s: float | None = None
        self._progress_s, self._answers = now_s, 0

    def find_fault(self) -> str:
        """Return why the server must be restarted; "" when it need not be."""
        state, now_s = self._state, time.monotonic()
        if not processes.is_running(state.pid, state.tag):
            return log.explain_end(state.log.read_text(errors="replace")) if state.log.exists() else "its process is gone"
        if is_scan := now_s - self._scanned_s > SCAN_EVERY_S:
            self._members, self._scanned_s = processes.find_server_members(state.tag), now_s
        statuses = [read_status(process) for process in self._members]
        # A stub that died before it was scanned is not among the members; only its parent shows that it is lost.
        if (is_scan or psutil.STATUS_ZOMBIE in statuses) and (n_lost_stubs := processes.count_lost_stubs(state.pid)):
            return f"{n_lost_stubs} of its Python model process(es) died"
        if psutil.STATUS_STOPPED not in statuses:
            self._paused_since_s = None
        elif self._paused_since_s is None:
            self._paused_since_s = now_s
        elif now_s - self._paused_since_s >= PAUSED_S:
            return "one of its processes was paused (SIGSTOP)"
        return self._find_hang(now_s)

    def _find_hang(self, now_s: float) -> str:
        """Return a fault when no request at all is answered. An overloaded server still answers some, and is not restarted."""
        if now_s - self._asked_s < ASK_EVERY_S:
            return ""
        self._asked_s = now_s
        try:
            ask(self._state.grpc_url, ASK_TIMEOUT_S)
            is_answered = True
        except ServerError as error:
            is_answered = "Deadline" not in str(error)  # an immediate refusal is no hang
        answers = _count_answers(self._state.grpc_url) or self._answers
        if is_answered or answers > self._answers:
            self._progress_s = now_s
        self._answers = answers
        if now_s - self._progress_s > HANGS_S:
            return f"{ENSEMBLE} has answered no request for {HANGS_S:g} s"
        return ""


def read_status(process: psutil.Process) -> str:
    try:
        return process.status()
    except psutil.NoSuchProcess:
        return "gone"


def _count_answers(grpc_url: str) -> int:
    """Return how many requests of `recommend` the server has answered; 0 when that cannot be read."""
    try:
        with open_local_client(grpc_url) as client:
            statistics = client.get_inference_statistics(ENSEMBLE, client_timeout=ASK_TIMEOUT_S)
    except Exception:  # every error: a server that hangs may answer this question with any error
        return 0
    return sum(model.inference_stats.success.count for model in statistics.model_stats)
