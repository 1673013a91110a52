"""`python -m server.watch`: supervise one server that was started here, until it is stopped.

    every 0.5 s  tritonserver or a stub gone, or paused for a second ─▶ restart, with the generation that was active
    at once      a mapped artifact is opened for writing ─▶ end the server, let the writer go on, then as after a change
                 one of a challenger ─▶ roll its experiment back, stop the challenger, let the writer go on
    every 0.5 s  an artifact changed on disk ─▶ restart with another intact generation, or take `recommend` out of service
                 an artifact of a challenger changed ─▶ roll its experiment back
                 its gateway paused ─▶ end it: its own supervisor restarts it
    every 2 s    no real request answered for ten seconds ─▶ restart
    every 5 s    its gateway gone with its supervisor ─▶ restart the gateway
                 helpers gone with their supervisors for 20 s ─▶ restart them
                 an experiment without a guard ─▶ start the guard, which rolls back a harmful challenger
                 a challenger promoted         ─▶ activate it
                 an experiment ended otherwise ─▶ unload its challenger
                 with `--follow-pin`, another generation is pinned ─▶ move to it within two minutes

While the server is down, the gateway answers with popular items. A server that keeps dying is restarted after a pause that
doubles from 0.2 s to 30 s. Every line of the log says what was found and what was done.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FrameType

import psutil

from repository.file_stamps import Stamp, read_stamp
from repository.generations import pin
from repository.registry import SERVER, record_act
from server import control, processes
from server.control import end_server, stop_server
from server.generations.activation import LOAD_TIMEOUT_S, find_pinned_generation, publish_nothing
from server.generations.challenger_files import ChallengerFiles, end_without_champion
from server.generations.integrity import ArtifactCheck, find_other_intact, is_intact
from server.generations.leases import Leases, wait_until_closed
from server.generations.release import Release
from server.helpers import gateway
from server.helpers.guard import ExperimentGuard
from server.helpers.revive import HelperWatch
from server.launcher import TritonServer
from server.observer import SCAN_EVERY_S, Observer, read_status
from server.pin_follower import PinFollower
from server.promotion import Promotion
from server.signals import name_signal
from server.start.environment import PROJECT
from server.start.lock import hold_start_lock
from server.state import ServerState, make_state_path, read_state
from server.status.health import open_local_client
from server.supervised import start_supervised
from server.supervisor import FIRST_PAUSE_S, LONGEST_PAUSE_S, STEADY_S
from serving.contract.errors import RecommenderError, ServerError
from serving.contract.logs import print_json_line
from serving.contract.tensors import ENSEMBLE

LOGGER = "server.watch"
TICK_S = 0.5
RESTART_TIMEOUT_S = 300.0
WRITTEN_S = 10.0  # longest wait for a program that has opened an artifact for writing


class Watch:
    """Supervises the server at one gRPC port."""

    def __init__(self, run_dir: Path, grpc_port: int) -> None:
        self._run_dir, self._port = run_dir, grpc_port
        self._pause_s, self._restarted_s, self._restart_failed = FIRST_PAUSE_S, float("-inf"), False
        self._observer: Observer | None = None
        self._check: ArtifactCheck | None = None
        self._challenger_files: ChallengerFiles | None = None
        self._observed: ServerState | None = None
        self._leases = Leases(())
        self._opened: queue.SimpleQueue[None] = queue.SimpleQueue()  # an Event's lock must not be taken in a signal handler
        self._gateways: list[psutil.Process] = []
        self._process: subprocess.Popen | None = None
        self._scanned_s = float("-inf")
        self._unwritten: set[str] = set()
        # Both while the server is out of service: the pin that was read last, and the files of its generation.
        self._seen_pin: Stamp | None = None
        self._pinned_check: ArtifactCheck | None = None
        self._exit_code = 0  # once a signal asked for the end: its number + 128

    def run(self) -> None:
        """Supervise until the server is stopped. Raises SystemExit once `exit_on_signal` was called."""
        while not self._exit_code and (path := make_state_path(self._run_dir, self._port)).exists():
            if state := read_state(path):
                try:
                    self._look(state)
                except Exception as error:  # every error: without its supervisor, a server that dies stays down
                    print_json_line("ERROR", LOGGER, f"unexpected: {error!r}", exception=traceback.format_exc())
            with contextlib.suppress(queue.Empty):
                self._opened.get(timeout=TICK_S)
        if self._exit_code:
            sys.exit(self._exit_code)

    def exit_on_signal(self, signum: int, _: FrameType | None) -> None:
        """Handle a signal: raise SystemExit, so that a restart, which may take minutes, is not waited for.

        Python ignores the exception while it finalises an object. `run` then ends after its present look.
        """
        self._exit_code = 128 + signum
        self.look_at_once()
        sys.exit(self._exit_code)

    def look_at_once(self) -> None:
        """End the pause between two looks. For signal handlers: may be called at any moment."""
        self._opened.put(None)

    def _look(self, state: ServerState) -> None:
        if self._observed is None or (state.pid, state.generation) != (self._observed.pid, self._observed.generation):
            self._observer = Observer(state)
            if self._check is None or (self._check.repo, self._check.generation) != (state.repo, state.generation):
                self._guard_files(state.repo, state.generation)
            self._followers = (
                ExperimentGuard(state, self._run_dir),
                Promotion(state, self._run_dir),
                Release(state),
                HelperWatch(state, self._run_dir),
                PinFollower(state, self._run_dir),
            )
            self._follow_challenger(state)
        self._observed = state
        assert self._challenger_files is not None
        if action := self._challenger_files.end_before_change(state.grpc_url):  # first: a writer waits, at most 45 s
            say(action)
        is_scan = time.monotonic() - self._scanned_s > SCAN_EVERY_S
        if is_scan:
            self._scanned_s = time.monotonic()
            self._keep_gateway(state)
        self._end_paused_gateway()
        if state.fault:
            self._return_to_service(state)
            return
        assert self._observer is not None
        assert self._check is not None
        if path := self._leases.find_opened():
            self._end_before_change(state, path)
        # First, because a server must not be restarted with damaged files; all are read once they may have failed a restart.
        if damage := self._check.read_all() if self._restart_failed else self._check.look():
            self._leave_generation(state, damage)
        elif fault := self._observer.find_fault():
            self._restart(state, self._describe_end(state, fault))
        if is_scan:
            for follower in self._followers:
                if action := follower.look():
                    say(action)
        if action := self._challenger_files.look(state.grpc_url):  # last: on a full disk it fails
            say(action)

    def _guard_files(self, repo: Path, generation: int) -> None:
        """From now on, notice every change of a generation's files."""
        self._leases.release()
        self._check = ArtifactCheck(repo, generation)
        self._leases = Leases(self._check.mapped)

    def _follow_challenger(self, state: ServerState) -> None:
        """From now on, notice every change of a challenger's files. A restart of the server interrupts nothing."""
        before = self._observed
        if before and self._challenger_files:
            if (before.repo, before.generation) == (state.repo, state.generation):
                return
            self._challenger_files.release()
        self._challenger_files = ChallengerFiles(state.repo)

    def _end_before_change(self, state: ServerState, path: Path) -> None:
        """End the server before a file that it maps changes, and wait until the file is written."""
        say(f"{path} is being opened for writing: the server is ended before it can answer from changed bytes")
        end_server(state)
        self._leases.release()
        wait_until_closed(path, WRITTEN_S)

    def _describe_end(self, state: ServerState, fault: str) -> str:
        """Return why the server ended: the signal if it is a child of this process and a signal ended it, otherwise `fault`."""
        child = self._process
        code = child.poll() if child is not None and child.pid == state.pid else None
        return f"it was ended by {name_signal(-code)}" if code is not None and code < 0 else fault

    def _prepare_challenger(self) -> None:
        """Let a server that is about to start load the champion alone where the challenger's files would fail the start."""
        assert self._challenger_files is not None
        try:
            if action := self._challenger_files.prepare_start(read_all=self._restart_failed):
                say(action)
        except (RecommenderError, OSError) as error:  # such as a read-only repository; the challenger may load all the same
            say(str(error))

    def _restart(self, state: ServerState, reason: str, generation: int | None = None) -> None:
        """Restart the server with the generation that it served, or with `generation`."""
        generation = generation or state.generation
        say(f"{reason}; restarting with generation {generation}")
        if time.monotonic() - self._restarted_s > STEADY_S and not self._restart_failed:
            self._pause_s = FIRST_PAUSE_S
        else:
            time.sleep(self._pause_s)
            self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
        begun_s = self._restarted_s = time.monotonic()
        self._guard_files(state.repo, generation)  # before the server reads them: a change from then on must not be missed
        with hold_start_lock(self._run_dir, self._port):
            now = read_state(make_state_path(self._run_dir, self._port))
            if now is None or (now.tag, now.generation) != (state.tag, state.generation):
                return  # stopped, or restarted by another process, or another generation is to be served: look again
            end_server(state)
            self._prepare_challenger()
            options = {"run_dir": self._run_dir, "former": now, "ready_timeout_s": RESTART_TIMEOUT_S}
            server = TritonServer.with_settings(state.repo, state.ports, state.settings, **options)
            try:
                # The pin stays as it is, because it would be lost if this process were killed before it put it back.
                with publish_nothing(state.repo):
                    server.start(generation if generation not in (0, find_pinned_generation(state.repo)) else None)
            except (RecommenderError, OSError) as error:
                if server.process is None or server.process.poll() is not None:
                    say(f"restart failed: {error}")
                    self._restart_failed = True
                    state.change(self._run_dir, generation=generation, fault=state.fault)
                    return
                say(str(error))  # only a helper failed to start: the server answers
        self._process, self._restart_failed = server.process, False
        say(f"answers again after {time.monotonic() - begun_s:.1f} s")

    def _leave_generation(self, state: ServerState, fault: str) -> None:
        """Restart with another generation whose files are intact; without one, take the model out of service."""
        say(fault)
        self._leases.release()  # a person who restores the files must not wait
        if generation := find_other_generation(state):
            self._try_to_write(partial(pin, state.repo, generation))
            self._try_to_write(partial(stop_experiment, state.repo, generation, fault))
            self._restart(state, fault, generation)
            self._try_to_write(partial(record_act, state.repo, "pinned", generation, reason=fault, author=SERVER))
            return
        until = "until the files are as published, or an intact generation is pinned"
        say(f"no other generation is intact: {ENSEMBLE} is taken out of service {until}")
        if processes.is_running(state.pid, state.tag):
            with open_local_client(state.grpc_url) as client:
                client.unload_model(ENSEMBLE, client_timeout=LOAD_TIMEOUT_S)
        else:
            end_server(state)
        state.change(self._run_dir, fault=fault)
        self._check = self._seen_pin = None  # so that the next tick reads the files again: they may have been restored

    def _try_to_write(self, write: Callable[[], object]) -> None:
        """Write into the repository, or say once why that fails: it may be read-only, or its disk full."""
        try:
            write()
        except (RecommenderError, OSError) as error:
            if str(error) not in self._unwritten:
                self._unwritten.add(str(error))
                say(str(error))

    def _return_to_service(self, state: ServerState) -> None:
        """Restart a server that was taken out of service once its files are as published, or another generation is pinned."""
        pin_stamp = read_stamp(state.repo / ENSEMBLE / "config.pbtxt")
        if pin_stamp != self._seen_pin or (self._pinned_check is not None and self._pinned_check.has_changed()):
            self._seen_pin, pinned = pin_stamp, find_pinned_generation(state.repo)
            # Made before the files are read, to notice changes meanwhile.
            self._pinned_check = ArtifactCheck(state.repo, pinned) if pinned not in (0, state.generation) else None
            if self._pinned_check is not None and not self._pinned_check.read_all():
                self._restart(replace(state, fault=""), f"generation {pinned} is pinned and intact", pinned)
                return
        if self._check is not None and not self._check.has_changed():
            return
        self._check = ArtifactCheck(state.repo, state.generation)  # made before the files are read, to notice changes meanwhile
        if is_intact(state.repo, state.generation):
            self._restart(replace(state, fault=""), "its files are as published again")

    def _end_paused_gateway(self) -> None:
        """End a gateway that is paused: callers wait for it. Its own supervisor starts it again."""
        for process in self._gateways:
            if read_status(process) == psutil.STATUS_STOPPED:
                say("its gateway was paused (SIGSTOP): ended, to be started again")
                process.kill()
                self._scanned_s = float("-inf")  # find the new one

    def _keep_gateway(self, state: ServerState) -> None:
        """Start the server's gateway again if it is gone with its own supervisor."""
        port = state.settings.get("gateway_port")
        if not port:
            return
        self._gateways = gateway.list_gateways(state.tag)
        if not self._gateways:
            say("its gateway is gone: starting it again")
            with contextlib.suppress(ServerError):  # the next call tries again; the gateway's log has the reason
                gateway.follow(state, int(port), str(state.settings.get("gateway_config", "")), self._run_dir)


def find_other_generation(state: ServerState) -> int | None:
    """Return an intact generation that the server does not serve; None also if the repository cannot be read."""
    try:
        return find_other_intact(state.repo, state.generation)
    except (RecommenderError, OSError) as error:
        say(str(error))
        return None


def stop_experiment(repo: Path, generation: int, damage: str) -> None:
    """Stop an experiment whose champion is left for `generation`, and say so. Raises RecommenderError or OSError."""
    if action := end_without_champion(repo, generation, damage):
        say(action)


def start_supervisor(state: ServerState, run_dir: Path) -> None:
    """Start the supervisor of a running server, unless it has one. If it is killed, it is started again, as helpers are."""
    if control.list_supervisors(state.tag):
        return
    start_supervised(log_path(run_dir, state.ports.grpc), build_arguments(state, run_dir))


def become_supervisor(state: ServerState, run_dir: Path) -> None:
    """Turn this process into the supervisor of a running server. When it ends, it stops the server."""
    os.chdir(PROJECT)
    os.execv(sys.executable, [sys.executable, *build_arguments(state, run_dir), "--owner"])


def build_arguments(state: ServerState, run_dir: Path) -> list[str]:
    """Return the arguments of Python with which it is a server's supervisor."""
    options = ["--grpc-port", str(state.ports.grpc), "--run-dir", str(run_dir.resolve()), "--tag", state.tag]
    return ["-m", control.WATCH_MODULE, *options]


def log_path(run_dir: Path, grpc_port: int) -> Path:
    return run_dir / "logs" / f"supervisor-{grpc_port}.log"


def read_last_lines(run_dir: Path, grpc_port: int, count: int = 5) -> list[str]:
    """Return the last lines of a supervisor's log as people read them: time and message."""
    path = log_path(run_dir, grpc_port)
    return [_shorten(line) for line in path.read_text(errors="replace").splitlines()[-count:]] if path.exists() else []


def _shorten(line: str) -> str:
    """Return time and message of a line of JSON, and any other line, such as of Python's traceback, as it is."""
    try:
        return "{time} {message}".format_map(json.loads(line))
    except (ValueError, KeyError, TypeError):  # also a line that is being written
        return line


def say(line: str) -> None:
    print_json_line("INFO", LOGGER, line)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m server.watch")
    parser.add_argument("--grpc-port", type=int, required=True)
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--tag", required=True, help="marks this process as the supervisor of that server")
    parser.add_argument("--owner", action="store_true", help="stop the server when this process ends")
    options = parser.parse_args()
    watching = Watch(options.run_dir, options.grpc_port)
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, watching.exit_on_signal)
    signal.signal(signal.SIGIO, lambda *_: watching.look_at_once())  # of a lease, see leases.py
    try:
        watching.run()
    finally:
        for signum in (signal.SIGTERM, signal.SIGINT):
            signal.signal(signum, signal.SIG_IGN)  # a second signal must not interrupt the stop
        state = read_state(make_state_path(options.run_dir, options.grpc_port))
        if options.owner and state is not None and state.tag == options.tag:
            stop_server(state, options.run_dir)


if __name__ == "__main__":
    main()
