"""Cause every fault of experiments/faults.py on a real server, and measure what callers see and how long it lasts.

    python -m experiments.recovery --repo model_repository [--rounds 3] [--only "rank killed"]

The server runs behind its gateway, with its supervisor, a Redis node that shares its users, and a Kafka broker that it reads
events from. Callers ask, post events and read `/readyz` without pause (experiments/fault_load.py). Each fault meets a
supervisor that has just been started, because one that restarts a server again and again waits longer each time.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from experiments.fault_backends import Broker, RedisNode, depend_on
from experiments.fault_load import ACCEPTED, FULL, WRONG, Load, Seen, select
from experiments.fault_metrics import MetricsPage
from experiments.faults import CPU_GROUPS, FAULTS, GATEWAY, SERVER, SUPERVISOR, THROTTLED, Fault, Site
from experiments.harness import RESULTS, Figure, ResultsFolder, finish, read_machine, run_in_turns
from experiments.served import publish_twice, serve_with_gateway
from live.archive import read_log
from perf.command import run
from server import processes, watch
from server.control import list_supervisors
from serving.contract.errors import ConfigError, ServerError

USERS = 20
LIMIT_S = 120.0
MESSAGES = 10
POLL_S = 0.01
SETTLED_S = 2.0  # until a supervisor that was just started has looked at every process
UNREADY, REVIVED, RECOVERED = "readiness fails after", "started again after", "answers in full after"
UNEXPECTED = "readiness fails, and should not"
ERROR_PAGES = "recommendations answered with an error"
WRONG_ANSWERS, LOST, DOUBLED = "wrong answers", "acknowledged events lost", "events counted twice"
NEVER = (WRONG_ANSWERS, LOST, DOUBLED, UNEXPECTED, ERROR_PAGES)
ALLOWED = {UNREADY: 2.0, REVIVED: 5.0} | dict.fromkeys(NEVER, 0.0)
SHOWN, SHOWN_AFTER = "metrics said so", "metrics said so after"
ARRIVED = "messages of Kafka are in the log after"
SECONDS = {UNREADY, ARRIVED, REVIVED, RECOVERED, "slowest answer", "slowest event", SHOWN_AFTER}
SHARES = "% "  # begins the names of shares
QUIET_S = 15.0  # in which the metrics pages are read without a fault


def measure_fault(site: Site, load: Load, pages: Sequence[MetricsPage], fault: Fault) -> dict[str, float]:
    """Cause a fault, and return what callers and the metrics pages saw of it, by name."""
    renew_supervisor(site)
    load.wait_until_full(LIMIT_S)
    earlier: set[str] = set()
    if fault.delays_messages:
        # More than a restarted, empty broker will hold: that is how the consumer notices the restart
        earlier = load.send_messages(site.broker.address, 10 * MESSAGES)
        wait_for_messages(site, earlier)
    load.acknowledged.clear()
    before, begun_s = read_pids(site), time.monotonic()
    values: dict[str, float] = {}
    with fault.cause(site):
        messages = load.send_messages(site.broker.address, MESSAGES) if fault.delays_messages else set()
        if fault.revived:
            wait(partial(is_revived, site, fault.revived, before), f"nothing started the {fault.revived} again")
            values[REVIVED] = time.monotonic() - begun_s
            load.wait_until_full(LIMIT_S)
        else:
            if fault.refuses_events:
                wait(partial(is_event_refused, load, begun_s), "no event was refused")
            time.sleep(fault.lasts_s)
    mended_s = begun_s if fault.revived else time.monotonic()
    if messages:
        wait_for_messages(site, messages)
        values[ARRIVED] = time.monotonic() - mended_s
    load.wait_until_full(LIMIT_S)
    ended_s = time.monotonic()
    load.send_again()
    values |= describe_answers(select(load.answers, begun_s, ended_s), mended_s)
    values |= describe_events(select(load.events, begun_s, ended_s))
    values |= describe_readiness(select(load.probes, begun_s, ended_s), begun_s, fault)
    values[LOST], values[DOUBLED] = load.count_lost(site.live_folder, earlier | messages)
    return values | describe_signals([page.find_signals(begun_s, ended_s) for page in pages])


def wait_for_messages(site: Site, ids: set[str]) -> None:
    wait(lambda: ids <= list_event_ids(site), "messages of Kafka are not in the log")


def describe_answers(answers: list[Seen], mended_s: float) -> dict[str, float]:
    """Return the share of each outcome, the slowest answer, and when the last answer came that was not in full."""
    outcomes = Counter(seen.outcome for seen in answers)
    values = {f"{SHARES}{name}": 100 * count / len(answers) for name, count in outcomes.items() if name != WRONG}
    values[WRONG_ANSWERS] = outcomes[WRONG]
    values[ERROR_PAGES] = sum(count for name, count in outcomes.items() if name[0].isdigit())
    values["slowest answer"] = max(seen.end_s - seen.at_s for seen in answers)
    values[RECOVERED] = max([0.0, *(seen.end_s - mended_s for seen in answers if seen.outcome != FULL)])
    return values


def describe_events(events: list[Seen]) -> dict[str, float]:
    refused = Counter(seen.outcome for seen in events if seen.outcome != ACCEPTED)
    shares = {f"{SHARES}events: {name}": 100 * count / len(events) for name, count in refused.items()}
    return shares | {"slowest event": max(seen.end_s - seen.at_s for seen in events)}


def describe_readiness(probes: list[Seen], begun_s: float, fault: Fault) -> dict[str, float]:
    """Return when `/readyz` first failed; of a fault that must not fail it, how often it did."""
    failed_s = [seen.end_s - begun_s for seen in probes if seen.outcome != FULL and seen.at_s >= begun_s]
    if fault.fails_readiness is False:
        return {UNEXPECTED: float(len(failed_s))}
    if fault.fails_readiness and not failed_s:
        raise ServerError("`/readyz` did not fail. Expected it to, because the server could not answer.")
    return {UNREADY: min(failed_s)} if failed_s else {}


def describe_signals(signals: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return whether a metrics page showed the fault, and after how many seconds.

    signals: one dict per page, seconds until each metric showed it
    """
    for shown in signals:
        print({name: round(after_s, 1) for name, after_s in shown.items()}, file=sys.stderr, flush=True)
    after_s = [seconds for shown in signals for seconds in shown.values()]
    return {SHOWN: float(bool(after_s))} | ({SHOWN_AFTER: min(after_s)} if after_s else {})


def read_pids(site: Site) -> dict[str, int | None]:
    """Return the processes of server, gateway and supervisor; None for one that does not run."""
    state = site.served.state
    gateways = [process.pid for process in site.served.find_gateway_processes()]
    supervisors = [process.pid for process in site.find_supervisors()]
    return {
        SERVER: state.pid if processes.is_running(state.pid, state.tag) else None,
        GATEWAY: max(gateways, default=None),
        SUPERVISOR: max(supervisors, default=None),
    }


def is_revived(site: Site, name: str, before: dict[str, int | None]) -> bool:
    return read_pids(site)[name] not in (before[name], None)


def is_event_refused(load: Load, begun_s: float) -> bool:
    return any(seen.outcome != ACCEPTED for seen in select(load.events, begun_s, time.monotonic()))


def list_event_ids(site: Site) -> set[str]:
    """Return the ids of the events in the log."""
    return {event_id.decode() for _, batch in read_log(site.live_folder) for event_id in batch.event_ids}


def renew_supervisor(site: Site) -> None:
    processes.terminate(list_supervisors(site.served.state.tag))
    watch.start_supervisor(site.served.state, site.served.run_dir)
    time.sleep(SETTLED_S)


def wait(condition: Callable[[], bool], failure: str) -> None:
    """Wait until the condition holds. Raises ServerError with `failure` after LIMIT_S."""
    begun_s = time.monotonic()
    while not condition():
        if time.monotonic() - begun_s > LIMIT_S:
            raise ServerError(f"After {LIMIT_S:g} s {failure}. See the supervisor's log.")
        time.sleep(POLL_S)


def make_figures(values: dict[str, list[float]], rounds: int) -> list[Figure]:
    """Return the figures of each fault, and the totals of NEVER. A share that is missing in a round is 0.

    A median over rounds would let a few of them lose events or show nothing: what must never happen is added up, and metrics
    said so if they did in every round. A signal of a fault that need not be shown makes up for no other.
    """
    figures, totals, shown = [], dict.fromkeys(NEVER, 0.0), list[float]()
    for name, measured in sorted(values.items(), key=lambda pair: list(FAULTS).index(pair[0].partition(": ")[0])):
        fault, _, kind = name.partition(": ")
        if kind in NEVER:
            measured = [sum(measured)]
            totals[kind] += measured[0]
            if not any(measured):
                continue
        if kind == SHOWN:
            shown += [min(measured)] * FAULTS[fault].is_shown
            continue
        unit = "s" if kind in SECONDS else "%" if kind.startswith(SHARES) else ""
        padded = measured + [0.0] * (rounds - len(measured)) if unit == "%" else measured
        figures.append(
            Figure(name=f"{fault}: {kind.removeprefix(SHARES)}", values=padded, unit=unit, at_most=ALLOWED.get(kind))
        )
    sums = [Figure(name=f"all faults: {kind}", values=[total], at_most=0) for kind, total in totals.items()]
    signals = Figure(name=f"all faults: {SHOWN}, of {len(shown)}", values=[sum(shown)], at_least=len(shown))
    return [*sums, signals, *figures]


def main(
    repo: Annotated[Path, typer.Option(help="repository whose models are served")] = Path("model_repository"),
    rounds: Annotated[int, typer.Option(help="rounds, of six minutes each", min=1)] = 3,
    only: Annotated[list[str] | None, typer.Option(help="name of a fault, instead of all; may be given again")] = None,
    results: ResultsFolder = RESULTS,
) -> None:
    """Cause every fault, and measure what callers see.

    Exit code 1 for a wrong answer, a lost event, readiness that fails after more than 2 s, a restart after more than 5 s,
    and for a fault that callers notice and that no metrics page shows.
    """
    if unknown := set(only or ()) - FAULTS.keys():
        raise ConfigError(f"There is no fault {min(unknown)!r}; expected some of {', '.join(FAULTS)}.")
    machine = read_machine()
    with tempfile.TemporaryDirectory() as name, RedisNode(Path(name)) as node, Broker() as broker:
        source, copy = Path(name) / "source", Path(name) / "repository"
        shutil.copytree(repo, source)
        depend_on(source, broker.address, node.address)
        publish_twice(source, copy)
        with serve_with_gateway(copy, supervised=True) as served:
            site = Site(served, node, broker)
            users = served.draw_user_ids(USERS, np.random.default_rng(0))
            urls = f"http://localhost:{served.state.ports.metrics}/metrics", f"http://localhost:{served.port}/metrics"
            with Load(served.port, users) as load, MetricsPage(urls[0]) as server, MetricsPage(urls[1]) as gateway:
                load.wait_until_full(LIMIT_S)
                begun_s = time.monotonic()
                time.sleep(QUIET_S)
                server.learn(begun_s)
                gateway.learn(begun_s)
                measure = partial(measure_named, site, load, (server, gateway))
                tasks = {fault: partial(measure, fault) for fault in only or list_allowed_faults()}
                values = run_in_turns(tasks, rounds, lambda line: print(line, file=sys.stderr, flush=True))
    command = f"python -m experiments.recovery --repo {repo} --rounds {rounds}"
    command += "".join(f' --only "{name}"' for name in only or ())
    finish(
        "recovery",
        "What dies is started again",
        command,
        f"{rounds} rounds",
        make_figures(values, rounds),
        results,
        machine,
    )


def list_allowed_faults() -> list[str]:
    """Return the faults that this user may cause: without a control group, the processor cannot be taken away."""
    return [name for name in FAULTS if name != THROTTLED or os.access(CPU_GROUPS, os.W_OK)]


def measure_named(site: Site, load: Load, pages: Sequence[MetricsPage], name: str) -> dict[str, float]:
    values = measure_fault(site, load, pages, FAULTS[name])
    print({kind: round(value, 2) for kind, value in values.items()}, file=sys.stderr, flush=True)
    return {f"{name}: {kind}": value for kind, value in values.items()}


if __name__ == "__main__":
    run(main, "python -m experiments.recovery")
