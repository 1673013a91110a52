"""Write what a reader needs to know of a run's figures: the one part of a report that draws nothing."""

from __future__ import annotations

from perf.report.results import Run

NOISY_LOAD = 0.5  # per core: above it the machine was busy with something else when the run began


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
