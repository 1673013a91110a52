"""Read the answers that users saw, with what users did, in parts, so that memory holds a part of a log of any size."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from live.exposures import FOLDER, SCHEMA, list_exposure_files, parse_written_ms, read_file, read_latest
from serving.live.experiment import INTERLEAVED_ARM, SHADOW_ARM, read_experiment
from trials.feedback import ATTRIBUTION_S, Feedback, join_feedback, read_events
from trials.off_policy import TrialError
from trials.progress import find_start_ms
from trials.split import find_latest_share, take_share

PART_ANSWERS = 100_000  # in memory at a time; some 400 MB
USED_BY_SPLIT = ("time_ms", "user_id", "arm", "assignment", "experiment")


def read_shown(
    folder: Path, experiment: str, since_ms: int = 0, generation: int | None = None
) -> Iterator[tuple[pa.Table, Feedback]]:
    """Yield all shown answers, or those of an experiment under its latest share, with their feedback, in parts.

    folder: of the live store; since_ms: leave out earlier answers, in unix milliseconds
    generation: only its answers, without interleaved ones, which are also the challenger's
    Raises TrialError without any.
    """
    latest = read_experiment(folder)
    if experiment and latest and latest.name == experiment:
        since_ms = max(since_ms, find_start_ms(latest))
    answer_filter, share = (pc.field("arm") != SHADOW_ARM) & (pc.field("time_ms") >= since_ms), None
    if experiment:
        answer_filter &= pc.field("experiment") == experiment
        share = find_latest_share(read_latest(folder, answer_filter, 1, since_ms))
    if generation is not None:
        answer_filter &= (pc.field("generation") == generation) & (pc.field("arm") != INTERLEAVED_ARM)
    has_answers = False
    for answers in read_parts(folder, answer_filter, since_ms):
        part = answers if share is None else take_share(answers, share)
        if len(part):
            has_answers = True
            from_ms, until_ms = pc.min_max(part["time_ms"]).as_py().values()
            yield part, join_feedback(part, read_events(folder, from_ms, until_ms + int(1_000 * ATTRIBUTION_S)))
    if not has_answers:
        raise TrialError(explain_nothing(folder, experiment, since_ms, generation))


def read_parts(folder: Path, answer_filter: pc.Expression, from_ms: int) -> Iterator[pa.Table]:
    """Yield the answers of a live store's log that match `answer_filter`, PART_ANSWERS at a time, the oldest first.

    from_ms: leave out files that were written before, in unix milliseconds
    """
    waiting = SCHEMA.empty_table()
    for path in list_exposure_files(folder / FOLDER):
        if parse_written_ms(path) >= from_ms and (table := read_file(path)) is not None:
            waiting = pa.concat_tables([waiting, table.filter(answer_filter)])
            while len(waiting) >= PART_ANSWERS:
                yield waiting.slice(0, PART_ANSWERS)
                waiting = waiting.slice(PART_ANSWERS)
    if len(waiting):
        yield waiting


def read_users(folder: Path, experiment: str, since_ms: int) -> pa.Table:
    """Return the answers of an experiment, as `measure_split` takes them. since_ms: the earliest time, unix milliseconds"""
    answer_filter = (pc.field("experiment") == experiment) & (pc.field("time_ms") >= since_ms)
    tables = [
        table.filter(answer_filter)
        for path in list_exposure_files(folder / FOLDER)
        if parse_written_ms(path) >= since_ms and (table := read_file(path, USED_BY_SPLIT)) is not None
    ]
    return pa.concat_tables([SCHEMA.empty_table().select(USED_BY_SPLIT), *tables])


def explain_nothing(folder: Path, experiment: str, since_ms: int, generation: int | None) -> str:
    """Return why no answer was shown: what the log has instead."""
    names: set[str] = set()
    generations: set[int] = set()
    count, interleaved = 0, False
    for path in list_exposure_files(folder / FOLDER):
        if parse_written_ms(path) >= since_ms and (table := read_file(path, (*USED_BY_SPLIT, "generation"))) is not None:
            table = table.filter(pc.field("time_ms") >= since_ms)
            names, count = names.union(table["experiment"].unique().to_pylist()), count + len(table)
            answers = table.filter(pc.field("experiment") == experiment) if experiment else table
            shown_answers = answers.filter(pc.field("arm") != SHADOW_ARM)
            generations |= set(shown_answers.filter(pc.field("arm") != INTERLEAVED_ARM)["generation"].unique().to_pylist())
            interleaved |= len(shown_answers.filter(pc.field("arm") == INTERLEAVED_ARM)) > 0
    if generation is not None and generations:
        known_text = ", ".join(map(str, sorted(generations)))
        others = " Interleaved answers are of two generations, and do not count." if interleaved else ""
        return f"None of these answers is of generation {generation}; expected one of {known_text}, which have some.{others}"
    if generation is not None and interleaved:
        return "All of these answers are interleaved, and so of two generations. Leave --generation out."
    since = f" since {datetime.fromtimestamp(since_ms / 1_000, UTC):%Y-%m-%d %H:%M:%S} UTC" if since_ms else ""
    if experiment:
        logged = ", ".join(sorted(filter(None, names))) or "no experiment"
        if since:
            return (
                f"No answer of experiment {experiment!r} is logged{since}: its start, the last change of its share, or as "
                f"--days say. Wait for some. The log has answers of {logged} since then."
            )
        return f"No answer of experiment {experiment!r} is logged; the log has answers of {logged}."
    if count:
        return "The log has answers of shadows alone, which nobody saw. Wait for shown answers."
    return f"No answer is logged{since}. Choose more --days."
