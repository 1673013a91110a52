"""Start and stop the real tritonserver on a repository.

    with TritonServer(Path("model_repository")) as server:      # free ports unless given
        client = tritonclient.grpc.InferenceServerClient(server.grpc_url)

`start` checks the repository, ports and memory, starts the process, and returns when every model is ready. On failure
it stops everything and raises ServerError with the first failing model and its log lines. Leaving the `with` block stops the
server. If the process that started it was killed, the next start in the same run folder stops the server.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from tritonclient.utils import InferenceServerException

from repository.applied_rules import compile_current_rules
from repository.generations import read_pinned_to
from repository.triton.models import (
    Model,
    check_backends,
    hash_manifest,
    read_repository,
    refuse_changed_manifests,
    refuse_unservable_path,
)
from server import keys, processes
from server.control import STOP_TIMEOUT_S, clear_stale, end_server, stop_server
from server.generations import activation
from server.helpers import generation_helpers
from server.signals import name_signal
from server.start.environment import RUN_DIR, build_backend_directory, build_server_env, find_wheel
from server.start.memory import check_memory
from server.start.ports import LOOPBACK, Ports, check_free, check_host, choose_reachable_host, find_free_ports, listens
from server.start.private_arguments import start_privately
from server.start.stall import StallWatch
from server.start.tls import ServerTls
from server.start.tracing import trace_options
from server.state import ServerState
from server.status import health, log
from serving.contract.errors import RecommenderError, ServerError
from serving.contract.tensors import OBSERVE

READY_TIMEOUT_S = 300.0
STALLED_AFTER_S = 60.0
MOST_LAUNCHES = 3  # a start that one of tritonserver's own faults ended may meet another one, on a busy machine
MEMORY_RACE = "boost::interprocess::lock_exception"  # tritonserver 2.51 aborts so when it loads two versions of a model
GRPC_STARTED = "Started GRPCInferenceService at"  # in the log of a tritonserver that listens
IN_FLIGHT_TIMEOUT_S = 10  # how long a stopping server waits for the requests that it has accepted
LAST_WORDS_S = 3.0  # a model's process may end a moment before the server logs why
POLL_S = 0.1


class TritonServer:
    """One server process.

    threads: per model instance and numeric library; cache_bytes: size of the response cache, 0: none
    host: the address to listen at, by default loopback; "0.0.0.0" opens it to the network
    http: whether to serve HTTP in addition to gRPC; tls: for gRPC; None: no TLS
    run_dir: folder of logs, state files and backends
    follow_pin: for its supervisor: move to whichever generation the repository is pinned to (pin_follower.py)
    former: the server to restart. The new one keeps its tag, its owner, and the settings of its gateway; None: a new server
    stalled_after_s: time without progress after which a launch is repeated
    """

    def __init__(
        self,
        repo: Path | str,
        ports: Ports | None = None,
        *,
        threads: int = 1,
        cache_bytes: int = 0,
        host: str = LOOPBACK,
        http: bool = True,
        tls: ServerTls | None = None,
        follow_pin: bool = False,
        ready_timeout_s: float = READY_TIMEOUT_S,
        stalled_after_s: float = STALLED_AFTER_S,
        run_dir: Path = RUN_DIR,
        former: ServerState | None = None,
    ) -> None:
        self.repo = Path(repo).resolve()
        self.ports = ports or find_free_ports()
        self.threads = threads
        self.cache_bytes = cache_bytes
        self.host = host
        self.http = http
        self.tls = tls
        self.follow_pin = follow_pin
        self.ready_timeout_s, self.stalled_after_s = ready_timeout_s, stalled_after_s
        self.run_dir = Path(run_dir).resolve()
        self.log_path = self.run_dir / "logs" / f"tritonserver-{self.ports.grpc}.log"
        self._state: ServerState | None = None
        self.process: subprocess.Popen | None = None
        self._owner, self._former = former.owner if former else "", former
        self._sends_configs = False

    @classmethod
    def with_settings(cls, repo: Path, ports: Ports, settings: Mapping[str, Any], **options: Any) -> Self:
        """Return a server with the settings of a ServerState. options: further arguments of TritonServer"""
        return cls(
            repo,
            ports,
            threads=settings["threads"],
            cache_bytes=settings["cache_mib"] << 20,
            host=settings["host"],
            http=not settings["no_http"],
            tls=ServerTls(Path(settings["tls"])) if settings.get("tls") else None,
            follow_pin=settings.get("follow_pin", False),
            **options,
        )

    @property
    def _tls_folder(self) -> str:
        return str(self.tls.folder.resolve()) if self.tls else ""

    @property
    def grpc_url(self) -> str:
        return f"{choose_reachable_host(self.host)}:{self.ports.grpc}"

    @property
    def http_url(self) -> str:
        return f"{choose_reachable_host(self.host)}:{self.ports.http}"

    @property
    def metrics_url(self) -> str:
        return f"http://{choose_reachable_host(self.host)}:{self.ports.metrics}/metrics"

    @property
    def state(self) -> ServerState:
        """The state of a started server. Raises ServerError before the start and after the end."""
        if self._state is None:
            raise ServerError(f"The server on {self.repo} does not run. Its log is {self.log_path}.")
        return self._state

    def start(self, generation: int | None = None) -> Self:
        """Start the server. Raises ServerError.

        generation: the one to serve although the repository's configs name another one; None: the one that they name

        It also raises when only a helper of the live store or the tables' updater fails; the server then keeps answering.
        """
        self.check_settings()
        models = read_repository(self.repo)
        if generation is not None:
            models = self._read_models_to_send(generation)
        check_backends(models)
        clear_stale(self.run_dir)
        check_free(self.ports)
        check_memory(models)
        self._compile_rules(models)
        settings: dict[str, int | bool | str] = dict(self._former.settings) if self._former else {}
        settings |= {"threads": self.threads, "cache_mib": self.cache_bytes >> 20}
        settings |= {"host": self.host, "no_http": not self.http, "tls": self._tls_folder, "follow_pin": self.follow_pin}
        target = generation or activation.find_pinned_generation(self.repo)
        if target:
            refuse_changed_manifests(self.repo, target)
        facts: dict[str, Any] = {"settings": settings, "content": hash_manifest(self.repo, target), "owner": self._owner}
        facts["generation"] = target
        self._sends_configs = generation is not None
        deadline_s = time.monotonic() + self.ready_timeout_s
        try:
            self._launch(models, facts)
            left = MOST_LAUNCHES - 1
            while fault := self._wait_ready(models, deadline_s, may_retry=left > 0):
                print(f"The start {fault}. Starting again; the log so far is {self.log_path}.1", file=sys.stderr)
                self.stop(timeout_s=0)
                self._launch(models, facts)
                left -= 1
        except BaseException:  # also on an interrupt
            self.stop(timeout_s=0)  # there are no requests to wait for
            raise
        generation_helpers.follow(self.state, self.run_dir)
        return self

    def check_settings(self) -> None:
        """Raise ConfigError or ServerError when no server can start with these settings, whatever else runs."""
        refuse_unservable_path(self.run_dir)
        check_host(self.host)
        if self.tls:
            self.tls.check_files()

    def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """Stop the server and all its processes. Does nothing when it was never started."""
        if self._state is not None and self._former:
            end_server(self._state, timeout_s)
        elif self._state is not None:
            stop_server(self._state, self.run_dir, timeout_s)
        self._state = None

    def __enter__(self) -> Self:
        self._owner = processes.identify_process()
        try:
            return self.start()
        except BaseException:
            self.stop(timeout_s=0)
            raise

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def _compile_rules(self, models: list[Model]) -> None:
        """Give each generation the rules in effect, which it may lack where the live store comes from a backup."""
        if any(model.name == OBSERVE for model in models):
            try:
                compile_current_rules(self.repo)
            except (OSError, RecommenderError) as error:
                print(f"warning: a generation that lacks the shop's current rules serves others: {error}", file=sys.stderr)

    def _launch(self, models: list[Model], facts: Mapping[str, Any]) -> None:
        wheel = find_wheel()
        tag = self._former.tag if self._former else f"triton_{self.ports.grpc}_{secrets.token_hex(6)}_"
        command = [
            str(wheel.server),
            f"--model-repository={self.repo}",
            f"--backend-directory={build_backend_directory(wheel, self.run_dir)}",
            f"--backend-config=python,shm-region-prefix-name={tag}",
            *(f"--{protocol}-address={self.host}" for protocol in ("grpc", "http", "metrics")),
            f"--grpc-port={self.ports.grpc}",
            f"--http-port={self.ports.http}",
            f"--allow-http={str(self.http).lower()}",
            f"--metrics-port={self.ports.metrics}",
            "--metrics-config=summary_latencies=true",  # quantiles of latency, for alerts and dashboards
            f"--exit-timeout-secs={IN_FLIGHT_TIMEOUT_S}",
            "--model-control-mode=explicit",  # lets `activate` move the server to another generation
            *(self.tls.server_options if self.tls else ()),
            *trace_options(os.environ),
            "--disable-auto-complete-config",  # our configs are complete; auto-completion costs one more process per model
        ]
        if not self._sends_configs:
            command.append("--load-model=*")
        if any(model.has_priorities for model in models):
            command.append("--rate-limit=execution_count")
        if self.cache_bytes:
            command += [f"--cache-directory={wheel.caches}", f"--cache-config=local,size={self.cache_bytes}"]
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        log.rotate(self.log_path)
        key = keys.new_key(self.grpc_url, tag, self._tls_folder)
        with self.log_path.open("ab") as log_file:  # appended to, so that logrotate may cut it short (copytruncate)
            # cwd: stubs import from their working directory first, and the checkout may be newer than the models.
            # start_new_session: so that Ctrl-C in the terminal does not reach the server.
            self.process = start_privately(
                command,
                keys.make_restricting_options(key),
                build_server_env(wheel, self.threads),
                cwd=self.run_dir,
                stdin=subprocess.DEVNULL,
                stdout=log_file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._state = ServerState(self.process.pid, tag, self.repo, self.log_path, self.ports, **facts)
        self._state.save(self.run_dir)

    def _read_models_to_send(self, generation: int) -> list[Model]:
        """Return the models with the configs by which the server loads a generation without those on disk, in that order."""
        pinned = read_pinned_to(self.repo, generation)
        names = {model.name for model in pinned}
        return [*pinned, *(model for model in read_repository(self.repo) if model.name not in names)]  # a challenger

    def _wait_ready(self, models: list[Model], deadline_s: float, may_retry: bool) -> str:
        """Wait until the server is ready. Return "", or a fault that another launch may not have. Raises ServerError.

        may_retry: whether another launch is allowed; otherwise those faults are raised too
        """
        process = self.process
        assert process is not None  # launched just now
        watch, dead_since, is_to_load = StallWatch(self.state.tag), float("inf"), self._sends_configs
        while True:
            if is_to_load and health.read_model_states(self.grpc_url) is not None:
                is_to_load = False
                with health.open_local_client(self.grpc_url) as client, contextlib.suppress(InferenceServerException):
                    activation.load_by_sent_configs(client, models, deadline_s)  # its log says what did not load
            text = self.log_path.read_text(errors="replace")
            if may_retry and process.poll() == -signal.SIGABRT and MEMORY_RACE in text:
                return "was ended by a race for shared memory"
            if process.poll() == -signal.SIGTERM:
                raise ServerError("The server was stopped while it started (SIGTERM, as of `make stop`). Start it again.")
            failure = log.find_first_failure(text)
            # tritonserver calls a model's process unhealthy that has ended, or that has waited too long for a core.
            if may_retry and failure and log.UNHEALTHY in failure.reason:
                return f"lost the process of the model {failure.model}"
            if process.poll() is not None:  # before readiness, because another server may answer at this address
                code = process.returncode
                ended = f"was ended by {name_signal(-code)}" if code < 0 else f"ended with exit code {code}"
                raise ServerError(self._describe_failure(ended, log.explain(text)))
            # Another server may have taken the port since it was free. tritonserver opens its metrics page last.
            if (
                GRPC_STARTED in text
                and health.is_ready(self.grpc_url)
                and listens(self.ports.metrics, choose_reachable_host(self.host))
            ):
                return ""
            if failure:
                raise ServerError(self._describe_failure("cannot serve this repository", failure))
            if dead := processes.find_dead_stubs(process.pid):
                dead_since = min(dead_since, time.monotonic())
            if time.monotonic() - dead_since > LAST_WORDS_S:
                raise ServerError(
                    self._describe_failure("lost a model's process while loading", log.find_unfinished(text, len(dead)))
                )
            if time.monotonic() > deadline_s:
                raise ServerError(
                    f"tritonserver is not ready after {self.ready_timeout_s:.0f} s: {health.list_unready(self.grpc_url)}. "
                    f"See {self.log_path}, or allow more time."
                )
            if may_retry and watch.measure_idle_s(len(text)) > self.stalled_after_s:
                return f"made no progress for {self.stalled_after_s:.0f} s: {health.list_unready(self.grpc_url)}"
            time.sleep(POLL_S)

    def _describe_failure(self, fact: str, failure: log.Failure) -> str:
        return (
            f"tritonserver {fact}; {failure}\nWhole log: {self.log_path}. `make check REPO={self.repo}` may say how to fix it."
        )
