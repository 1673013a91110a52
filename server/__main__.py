"""python -m server start | stop | status | wait | diagnose | activate | rules | experiment: what `make serve` runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from repository.generations import drop_challenger, list_published_generations, pin
from repository.registry import SERVER, record_act
from repository.triton.models import hash_manifest
from server import control, experiment, rules, watch
from server.control import clear_stale, find_running_servers, stop_server
from server.generations.activation import find_pinned_generation, find_served_generation
from server.generations.challenger_files import drop_damaged_challenger, end_without_champion
from server.generations.integrity import MEND, choose_generation
from server.helpers import gateway
from server.helpers.live_status import describe_redis_and_kafka
from server.launcher import READY_TIMEOUT_S, TritonServer
from server.processes import count_lost_stubs, is_running
from server.start.environment import MEASURED_DIR, RUN_DIR, describe_unwritable_cache
from server.start.lock import hold_start_lock
from server.start.ports import LOOPBACK, Ports, check_free, listens
from server.state import ServerState, find_unreadable_states, read_known_servers
from server.status.condition import examine, list_start_warnings
from server.status.health import is_ready, wait_ready
from server.status.log import explain, explain_end
from server.status.store_place import describe_left_store, record_store
from serving.contract.errors import ConfigError, RecommenderError, ServerError, run_program
from serving.contract.generations import read_pinned_generation

app = typer.Typer(help="Start, stop, wait for, and diagnose a real tritonserver.", no_args_is_help=True, add_completion=False)

app.add_typer(rules.app, name="rules")
app.add_typer(experiment.app, name="experiment")

DEFAULTS = {"threads": 1, "cache_mib": 0, "host": LOOPBACK, "no_http": False, "tls": "", "follow_pin": False}


Settings = dict[str, int | bool | str]

GrpcPort = Annotated[int, typer.Option(help="gRPC port of the server")]
OneServer = Annotated[int | None, typer.Option("--grpc-port", help="only the server with this gRPC port")]
ChosenServer = Annotated[
    int | None, typer.Option("--grpc-port", help="gRPC port of the server (default: that of the only one started here)")
]
Timeout = Annotated[float, typer.Option("--timeout-s", min=1, help="seconds until every model must be ready")]


@app.command()
def start(
    repo: Annotated[Path, typer.Option(help="model repository")] = Path("model_repository"),
    grpc_port: GrpcPort = 8001,
    http_port: Annotated[int, typer.Option(help="HTTP port")] = 8000,
    metrics_port: Annotated[int, typer.Option(help="Prometheus metrics port")] = 8002,
    threads: Annotated[
        int | None, typer.Option(min=1, help="threads per model instance and numeric library (default 1)")
    ] = None,
    cache_mib: Annotated[int | None, typer.Option(min=0, help="response cache, MiB (default 0: none)")] = None,
    host: Annotated[
        str | None,
        typer.Option(help=f"address to listen at (default {LOOPBACK}: this machine only; 0.0.0.0: everybody who reaches it)"),
    ] = None,
    no_http: Annotated[
        bool, typer.Option("--no-http", help="serve gRPC only, for instance because another program serves HTTP")
    ] = False,
    tls: Annotated[
        Path | None, typer.Option(help="folder of PEM files: gRPC over TLS, or mutual TLS (docs/operating.md)")
    ] = None,
    follow_pin: Annotated[
        bool,
        typer.Option("--follow-pin", help="move by itself to the generation that another process pins, such as a CronJob's"),
    ] = False,
    gateway_port: Annotated[
        int, typer.Option(min=0, max=65_535, help="port of the REST gateway, on this machine only; 0: no gateway")
    ] = 0,
    gateway_config: Annotated[Path | None, typer.Option(help="settings of the gateway (docs/gateway.md)")] = None,
    gateway_optional: Annotated[
        bool,
        typer.Option(
            "--gateway-optional",
            help="the port is a default: keep a running gateway at its port; if none can start, print a note and serve",
        ),
    ] = False,
    unsupervised: Annotated[
        bool,
        typer.Option(
            "--unsupervised", help="start no supervisor: something else restarts the server, such as a container's policy"
        ),
    ] = False,
    foreground: Annotated[
        bool,
        typer.Option("--foreground", help="keep running as the server's supervisor until SIGTERM, then stop it (for systemd)"),
    ] = False,
    timeout_s: Timeout = READY_TIMEOUT_S,
) -> None:
    """Start in the background; returns when every model is ready. A server that already serves this repository is kept.

    Settings that differ from those of the kept server are an error. A server that lost a model's process is restarted.
    """
    if follow_pin and unsupervised:
        raise ConfigError(
            "--follow-pin needs a supervisor that moves the server, and --unsupervised leaves none. Use one of the two."
        )
    if gateway_config is not None and not gateway_port:
        raise ConfigError("--gateway-config needs --gateway-port. Add it.")
    ports = Ports(grpc_port, http_port, metrics_port)
    options = {"threads": threads, "cache_mib": cache_mib, "host": host, "tls": str(tls.resolve()) if tls else None}
    options |= {"no_http": no_http or None, "follow_pin": follow_pin or None}
    requested = {name: value for name, value in options.items() if value is not None}
    with _hold_lock_once_ready(repo, ports, requested, timeout_s):
        state = _start(repo, ports, requested, timeout_s)
        try:
            if gateway_port:
                state = _start_gateway(state, gateway_port, gateway_config, gateway_optional)
        except gateway.ServerStopped:
            unsupervised = True
            raise
        finally:  # the server serves with or without a gateway
            if not unsupervised and not foreground:
                watch.start_supervisor(state, RUN_DIR)
    if foreground:
        watch.become_supervisor(state, RUN_DIR)


def _start_gateway(state: ServerState, port: int, config: Path | None, optional: bool) -> ServerState:
    before = state.settings.get("gateway_url") if gateway.list_gateways(state.tag) else None
    try:
        state = gateway.follow(state, port, str(config.resolve()) if config else "", RUN_DIR, keep_port=optional)
    except ServerError as error:
        if not optional or isinstance(error, gateway.ServerStopped):
            raise
        typer.echo(f"note: {error}", err=True)
        return state
    url = state.settings["gateway_url"]
    move_text = f" (until now {before}, where nothing answers any more)" if before not in (None, url) else ""
    typer.echo(f"gateway: {url}{move_text}")
    return state


@contextmanager
def _hold_lock_once_ready(repo: Path, ports: Ports, requested: Settings, timeout_s: float) -> Iterator[None]:
    """Hold the start lock, after a server that runs there has become ready, has ended or must be restarted.

    It waits without the lock, because the supervisor of a server that hangs needs the lock to restart it.
    """
    while True:
        with hold_start_lock(RUN_DIR, ports.grpc):  # a second command waits, and finds the server of the first
            running = _find_running(repo, ports)
            if running is None or _find_fault(running) or is_ready(running.grpc_url):
                yield
                return
        _refuse_other_settings(running, requested)
        again = f"To restart it: make stop GRPC_PORT={ports.grpc}, then this command again"
        typer.echo(f"waiting for a server that is starting, or hangs: {_describe(running)}. {again}", err=True)
        wait_ready(running.grpc_url, timeout_s, partial(_can_become_ready, running))


def _can_become_ready(state: ServerState) -> bool:
    """Return whether a server still runs, as the same process, and need not be restarted."""
    now = _find_running(state.repo, state.ports)
    return now is not None and now.pid == state.pid and not _find_fault(now)


def _start(repo: Path, ports: Ports, requested: Settings, timeout_s: float) -> ServerState:
    """Start, keep or restart a server. requested: settings that the caller set

    Nothing is stopped before the generation, the address and the TLS files are checked: the gateway of a server that is out of
    service answers with popular items. The repository does not change before these checks either, nor if a port is taken.
    """
    running = _find_running(repo, ports)
    fault = _find_fault(running) if running else ""
    if running and not fault:
        _refuse_other_settings(running, requested)
        if _move_to_pinned(running):
            typer.echo(f"already running: {_describe(running)}")
            return running
    settings: dict[str, Any] = DEFAULTS | (running.settings if running else {}) | requested
    server = TritonServer.with_settings(repo, ports, settings, ready_timeout_s=timeout_s, run_dir=RUN_DIR)
    server.check_settings()
    generation, damage = choose_generation(repo)
    if not running:  # otherwise it has the ports
        check_free(ports)
    if left_store := describe_left_store(repo):
        typer.echo(f"WARNING: {left_store}.", err=True)
    _try_to_write(partial(record_store, repo, generation))
    if left_out := drop_damaged_challenger(repo):  # a start that is refused before leaves the experiment as it was
        typer.echo(f"WARNING: {left_out}.", err=True)
    if running:
        if fault:
            typer.echo(f"starting again: {fault}: {_describe(running)}")
        stop_server(running, RUN_DIR)
    for state in read_known_servers(RUN_DIR):
        if state.ports.grpc == ports.grpc and not is_running(state.pid, state.tag):
            stop_server(state, RUN_DIR)  # its supervisor would start it as well
    for warning in filter(None, (*list_start_warnings(repo), describe_unwritable_cache())):
        typer.echo(f"WARNING: {warning}.", err=True)
    if damage:
        _start_other_generation(server, generation, damage)
    else:
        server.start()
    typer.echo(f"ready: {_describe(server.state)}")
    return server.state


def _start_other_generation(server: TritonServer, generation: int, damage: str) -> None:
    """Start with an intact generation instead of the pinned one, and pin it. damage: of the pinned one"""
    typer.echo(f"WARNING: {damage}. Starting with generation {generation}, which is intact.", err=True)
    _try_to_write(partial(pin, server.repo, generation))
    _try_to_write(partial(_end_experiment, server.repo, generation, damage))
    server.start(generation if find_pinned_generation(server.repo) != generation else None)  # it may be read-only
    _try_to_write(partial(record_act, server.repo, "pinned", generation, reason=damage, author=SERVER))


def _end_experiment(repo: Path, generation: int, damage: str) -> None:
    """Stop an experiment whose champion is left for `generation`, and keep its challenger out of the start."""
    if ended := end_without_champion(repo, generation, damage):
        typer.echo(f"WARNING: {ended}.", err=True)
        drop_challenger(repo)


def _try_to_write(write: Callable[[], object]) -> None:
    """Write into the repository, or print why that fails: it may be read-only."""
    try:
        write()
    except (RecommenderError, OSError) as error:
        typer.echo(f"note: {error}", err=True)


@app.command()
def stop(grpc_port: OneServer = None) -> None:
    """Stop the servers started here, or the one at a port; also clean up after killed ones."""
    chosen = [state for state in read_known_servers(RUN_DIR) if grpc_port in (None, state.ports.grpc)]
    for state in chosen:
        stop_server(state, RUN_DIR)
        typer.echo(f"stopped: {_describe(state)}")
    if grpc_port is None:
        for state in clear_stale(MEASURED_DIR):
            typer.echo(f"stopped: {_describe(state)}, left over from a killed measurement")
            chosen.append(state)
    if not chosen:
        typer.echo("nothing to stop: no server was started here" + (f" on gRPC port {grpc_port}" if grpc_port else ""))


@app.command()
def status(grpc_port: OneServer = None) -> None:
    """List the servers that were started here, and send each a real request; exit code 1 unless there is one and all answer."""
    states = [state for state in read_known_servers(RUN_DIR) if grpc_port in (None, state.ports.grpc)]
    broken = False
    for state in states:
        condition = examine(state.grpc_url, state)
        broken |= bool(condition.fault)
        ran = is_running(state.pid, state.tag)
        typer.echo(f"{'running' if ran else 'ended'}: {_describe(state)}  log {state.log}")
        typer.echo(f"  FAILS: {condition}. {_describe_restart(state)}" if condition.fault else f"  {condition}")
        for line in describe_redis_and_kafka(state, RUN_DIR) if ran else ():  # answers go on without them, so no fault
            typer.echo(f"  {line}")
    for path in find_unreadable_states(RUN_DIR):
        typer.echo(f"note: {path} names no server. Remove it; no command can find the server it was written for.", err=True)
    if not states:
        place = "here" if grpc_port is None else f"here on gRPC port {grpc_port}"
        typer.echo(f"no server is running {place}. Start one with `make serve`.")
    if broken or not states:
        raise typer.Exit(1)


@app.command()
def wait(
    url: Annotated[str, typer.Option(help="host:port of gRPC")] = "localhost:8001", timeout_s: Timeout = READY_TIMEOUT_S
) -> None:
    """Wait until a server, wherever it was started, and every model in it are ready."""
    wait_ready(url, timeout_s)
    typer.echo(f"ready: {url}")


@app.command()
def diagnose(grpc_port: ChosenServer = None) -> None:
    """Report why a server ended or does not answer, the faults in its log, and why it was restarted.

    Exit code 1 unless it answers.
    """
    servers = read_known_servers(RUN_DIR)
    state = _choose_server(servers, grpc_port)
    grpc_port = state.ports.grpc if state else grpc_port or Ports.grpc
    log_path = state.log if state else RUN_DIR / "logs" / f"tritonserver-{grpc_port}.log"
    url = state.grpc_url if state else f"localhost:{grpc_port}"
    condition = examine(url, state)
    if not condition.fault:
        typer.echo(f"server at {url}: {condition}")
        for line in watch.read_last_lines(RUN_DIR, grpc_port) if state else ():  # it was restarted before anybody asks why
            typer.echo(f"supervisor: {line}")
        return
    log = log_path.read_text(errors="replace") if log_path.exists() else ""
    ended = f"{explain_end(log)}; " if log and state is None and not listens(grpc_port) else ""
    others = ", ".join(f"--grpc-port {other.ports.grpc}" for other in servers)
    elsewhere = f" Servers that were started here: {others}." if others and state is None else ""
    typer.echo(f"server at {url}: {ended}{condition}" + (f". {_describe_restart(state)}" if state else elsewhere))
    if log:
        typer.echo(f"log {log_path}: {explain(log)}")
    for line in watch.read_last_lines(RUN_DIR, grpc_port):
        typer.echo(f"supervisor: {line}")
    raise typer.Exit(1)


@app.command()
def activate(generation: Annotated[int, typer.Option(help="generation to serve")], grpc_port: ChosenServer = None) -> None:
    """Move a running server to another published generation, without a failed request."""
    port = _choose_running(grpc_port).ports.grpc
    with hold_start_lock(RUN_DIR, port):
        state = _choose_running(port)  # read again: another command may have stopped or moved it meanwhile
        before = control.activate(state, generation, RUN_DIR)
    typer.echo(f"generation {generation} answers at {state.grpc_url} (before: {before})")


def _choose_running(grpc_port: int | None) -> ServerState:
    """Return the running server with a gRPC port, or without a port the only one. Raises ServerError for none or several."""
    state = _choose_server(find_running_servers(RUN_DIR), grpc_port)
    if state is None:
        port_text = f" on gRPC port {grpc_port}" if grpc_port else ""
        raise ServerError(f"No server started here runs{port_text}. `python -m server status` lists them for --grpc-port.")
    return state


def _choose_server(states: Sequence[ServerState], grpc_port: int | None) -> ServerState | None:
    """Return the server with a gRPC port, or without a port the only one; None without any. Raises ServerError for several."""
    chosen = [state for state in states if grpc_port in (None, state.ports.grpc)]
    if len(chosen) > 1:
        ports = ", ".join(str(state.ports.grpc) for state in chosen)
        raise ServerError(f"{len(chosen)} servers were started here, on the gRPC ports {ports}. Choose one by --grpc-port.")
    return chosen[0] if chosen else None


def _find_fault(state: ServerState) -> str:
    """Return why a running server must be restarted; "" if it need not be."""
    if state.fault:
        return state.fault
    n_lost_stubs = count_lost_stubs(state.pid)
    return f"{n_lost_stubs} of its Python model process(es) died" if n_lost_stubs else ""


def _describe_restart(state: ServerState) -> str:
    """Return what brings a server back as it was: its supervisor, its files, or a command."""
    ports = f"--grpc-port {state.ports.grpc} --http-port {state.ports.http} --metrics-port {state.ports.metrics}"
    names = (*DEFAULTS, "gateway_port", "gateway_config")
    chosen = {name: value for name in names if (value := state.settings.get(name, "")) not in ("", DEFAULTS.get(name))}
    options = "".join(f" --{name.replace('_', '-')}{'' if value is True else f' {value}'}" for name, value in chosen.items())
    command = f".venv/bin/python -m server start --repo {state.repo} {ports}{options}"
    supervised = bool(control.list_supervisors(state.tag))
    if state.fault:
        return f"{MEND}. {'Its supervisor then starts it again by itself' if supervised else f'Then start it again: {command}'}"
    if supervised:
        return f"Its supervisor starts it again within seconds. By hand: {command}"
    if is_running(state.pid, state.tag):
        return f"Stop it, then start it again: make stop GRPC_PORT={state.ports.grpc} && {command}"
    return f"Start it again: {command}"


def _find_running(repo: Path, ports: Ports) -> ServerState | None:
    """Return the running server of a repository at these ports."""
    same = (state for state in find_running_servers(RUN_DIR, repo) if state.ports == ports)
    return next(same, None)


def _refuse_other_settings(running: ServerState, requested: Settings) -> None:
    """Raise ServerError when a passed setting differs from the running server's; only a restart changes one."""
    other = {name: value for name, value in requested.items() if value != running.settings.get(name)}
    if other:
        running_text = ", ".join(f"{name} {str(running.settings.get(name, 'unknown')) or 'none'}" for name in other)
        wanted_text = ", ".join(f"{name} {value}" for name, value in other.items())
        raise ServerError(
            f"A server already runs with {running_text}: {_describe(running)}. Expected {wanted_text}, which needs a restart: "
            f"python -m server stop --grpc-port {running.ports.grpc}, then start again."
        )


def _move_to_pinned(state: ServerState) -> bool:
    """Move a running server to the pinned generation. Return False when it cannot move and must be restarted."""
    served_generation, pinned_generation = find_served_generation(state.grpc_url), read_pinned_generation(state.repo)
    is_pruned = served_generation not in list_published_generations(state.repo)  # pruned, so the server cannot move
    is_replaced = state.content != hash_manifest(state.repo, served_generation)  # the repository was replaced
    if is_pruned or is_replaced:
        return False
    control.activate(state, pinned_generation, RUN_DIR)
    if served_generation != pinned_generation:
        typer.echo(f"moved to the pinned generation: {served_generation} -> {pinned_generation}")
    return True


def _describe(state: ServerState) -> str:
    ports = state.ports
    http = "no HTTP" if state.settings.get("no_http") else f"HTTP {ports.http}"
    host = state.settings.get("host", LOOPBACK)
    opened = f", open to whoever reaches {host}" if host != LOOPBACK else ""
    url = state.settings.get("gateway_url")  # stated once the gateway has started
    helpers = f", gateway {url}" if url and gateway.list_gateways(state.tag) else ""
    helpers += ", supervised" if control.list_supervisors(state.tag) else ""
    return f"{state.repo} at gRPC {state.grpc_url}, {http}, metrics {ports.metrics}{helpers}{opened} (process {state.pid})"


if __name__ == "__main__":
    run_program(app)
