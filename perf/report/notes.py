"""Write what a reader needs to know of a run's figures: the one part of a report that draws nothing."""

from __future__ import annotations

from perf.report.results import Open, Run

NOISY_LOAD = 0.5  # per core: above it the machine was busy with something else when the run began
FEWEST_REQUESTS = 100  # below, the 99th percentile is the slowest request
LATE_SHARE = 0.1  # of p99: above it, the load generator is part of what was measured
LISTED_ERRORS = 3


def write_notes(run: Run) -> list[str]:
    """Return sentences that a reader needs to trust the figures, or not."""
    notes = []
    if run.machine.load_before > NOISY_LOAD * run.machine.cores:
        notes.append(
            f"The machine was busy when this run began (load average {run.machine.load_before:.1f} on {run.machine.cores} "
            "cores): trust ratios, not times."
        )
    if run.floor_p50_ms is not None:
        notes.append(
            f"A gRPC call that does nothing took {run.floor_p50_ms:.2f} ms (p50, one client): no answer can be faster."
        )
    notes += [f"{load.name}: {note}" for load in run.open for note in _describe_load(load)]
    late = [
        f"{load.name} ({load.send_late.p99_ms:.2f} ms)"
        for load in run.open
        if load.latency and load.send_late and load.send_late.p99_ms > LATE_SHARE * load.latency.p99_ms
    ]
    if late:
        notes.append(
            f"The load generator itself sent late (p99), which is part of the latencies: {', '.join(late)}. Lower the rate, or "
            "end what else runs on this machine."
        )
    if run.differing_answers:
        notes.append(
            f"The server does not answer as in process ({run.differing_answers}): the ratios between them do not "
            "count. A cache of answers may explain it; otherwise export again."
        )
    elif run.compared_under_load:
        notes.append(f"{run.compared_under_load:,} answers under load were compared: each is the one computed in process.")
    elif not run.comparable:
        notes.append("No answer was compared with one computed in process, because rows are updated while they are served.")
    return notes


def _describe_load(load: Open) -> list[str]:
    """Return what makes the latencies of an open-loop load other than they seem."""
    notes, failed, latency = [], sum(load.errors.values()), load.latency
    n_answered = latency.count if latency else 0
    if not failed and not n_answered:
        notes.append("no request was due. Raise the rate or the duration.")
    if failed:
        listed = [f"{message} ({count:,})" for message, count in list(load.errors.items())[:LISTED_ERRORS]]
        more = len(load.errors) - len(listed)
        reasons = "; ".join(listed) + (f"; and {more} other errors" if more else "")
        notes.append(f"{failed:,} of {failed + n_answered:,} requests failed, and have no latency: {reasons}.")
    if load.degraded:
        notes.append(f"{load.degraded:,} of {n_answered:,} answers were degraded.")
    if latency and latency.count < FEWEST_REQUESTS:
        notes.append(f"only {latency.count} requests were answered, so p99 is the slowest of them.")
    return notes
