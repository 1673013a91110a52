"""python -m live inspect | replay | compact | maintain | consume | share | export | erase | forget | backup | restore."""

from __future__ import annotations

import calendar
import logging
import time
from collections import Counter
from contextlib import closing
from dataclasses import fields
from datetime import datetime
from itertools import chain
from pathlib import Path
from typing import Annotated

import typer

from live.archive import LAST_SEQUENCE, drop_segments, export_log, find_log_place
from live.archive import compact as compact_log
from live.backup import back_up
from live.backup import restore as restore_backup
from live.consumer import EventConsumer
from live.erase import erase_user
from live.exposure_merges import merge_exposures
from live.forget import ALWAYS_MS, forget_items
from live.ids import find_item_id, find_user_id, is_learned, read_item_texts
from live.maintenance import DAY_MS, MOST_DAYS, Retention, choose_archived_until, lock, wait_for_writers
from live.maintenance import maintain as maintain_store
from live.messages import MessageDecoder
from live.printing import describe_counts, format_time, out, show_columns, show_deferred, show_store, show_user
from live.replay import replay as replay_log
from live.sharing import Sharer
from serving.contract.artifacts import find_stage_folder, make_stage_settings, read_stage
from serving.contract.errors import ConfigError, RecommenderError, run_program
from serving.contract.generations import read_pinned_generation
from serving.contract.ids import session_id
from serving.contract.logs import configure_logging, print_json_line
from serving.contract.rounds import remove_abandoned
from serving.contract.scratch import remove_left_scratch
from serving.contract.signals import stop_on_signals
from serving.contract.tensors import OBSERVE, STAGES
from serving.live.admission import ChangeAdmission
from serving.live.events import ITEM_CHANGED
from serving.live.reader import Reader
from serving.live.seeds import GenerationSeeds
from serving.live.shared.redis_state import PATIENT_S, RedisState
from serving.live.store import find_live_folder, open_store
from serving.live.writer import Writer, WriterSettings
from serving.stages.live.models import LiveSettings, Observe
from serving.stages.rules.applied import FOLDER as RULES
from serving.stages.rules.applied import read_current_version

app = typer.Typer(help="Look after the events of a shop.", no_args_is_help=True, add_completion=False)
Repo = Annotated[Path, typer.Option(help="model repository; its live store is beside it")]
DEFAULT = Path("model_repository")


@app.command()
def inspect(
    repo: Repo = DEFAULT,
    user: Annotated[str | None, typer.Option(help="show what is known of this user, as the shop writes it")] = None,
    item: Annotated[
        str | None, typer.Option(help="show the columns of this item, as the shop writes it, that upsert has set")
    ] = None,
) -> None:
    """Print what the store holds: events, users, items, clock, bytes, and which keys in Redis cannot be read."""
    folder = find_store(repo)
    with closing(Reader(folder)) as reader, reader.snapshot() as snapshot:
        if user is not None:
            show_user(snapshot, user, find_user_id(repo, user), read_item_texts(repo))
        if item is not None:
            show_columns(snapshot.read_change(ITEM_CHANGED, find_item_id(repo, item)))
        if user is not None or item is not None:
            return
        show_store(folder, snapshot)
    if shared := open_shared_state(repo):
        show_deferred(folder, shared)


@app.command()
def replay(
    repo: Repo = DEFAULT,
    repair: Annotated[bool, typer.Option("--repair", help="replace records that differ by the replayed ones")] = False,
) -> None:
    """Recompute the state from the log and compare it with the store, byte for byte. Stop the server first."""
    replayed = replay_log(find_store(repo), repair)
    out.print(f"{replayed.events:,} events replayed; records that differ: {describe_counts(replayed.differing)}")
    if not replayed.is_equal:
        out.print("The store now holds the replayed state." if repair else "Run it again with --repair to correct the store.")
        raise typer.Exit(0 if repair else 1)


@app.command()
def compact(
    repo: Repo = DEFAULT,
    keep_days: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=MOST_DAYS,
            help="newer events stay in the store, which recognises their ids (default: as `live maintain` does, docs/live.md)",
        ),
    ] = None,
    archive_days: Annotated[float | None, typer.Option(min=0, max=MOST_DAYS, help="remove segments that are older")] = None,
    archive_bytes: Annotated[int | None, typer.Option(min=0, help="remove the oldest segments beyond this size")] = None,
) -> None:
    """Move old events from the store into the archive, then remove expired segments. The server may keep running."""
    folder, now_ms, known_until_ms = find_store(repo), time.time_ns() // 1_000_000, find_clock_ms(repo)
    too_old_ms = None if archive_days is None else now_ms - round(archive_days * DAY_MS)
    with lock(folder, wait=True), closing(open_writer(folder, repo)) as writer:
        if keep_days is None:
            until_ms = choose_archived_until(writer, writer.settings.key_days, now_ms, known_until_ms)
        else:
            until_ms = now_ms - round(keep_days * DAY_MS)
        n_moved, segments = compact_log(writer, until_ms)
        dropped = drop_segments(folder, too_old_ms, archive_bytes, now_ms)
    out.print(f"{n_moved:,} events moved into {len(segments)} segments, {len(dropped)} segments removed")
    if n_moved and known_until_ms is not None and until_ms > known_until_ms:
        out.print(
            f"warning: the pinned generation knows events until {format_time(known_until_ms)}, and some that were moved are "
            "newer. A server or gateway that starts before the next export does not count these for popularity, companions "
            "and aggregations. Histories still have them."
        )


@app.command()
def maintain(
    generation: Annotated[int | None, typer.Argument(help="generation that answers (default: the pinned one)")] = None,
    repo: Repo = DEFAULT,
    tag: Annotated[str, typer.Option(help="marks this process, so that its server finds it")] = "",
) -> None:
    """Do one round of maintenance with the `live` settings of the export: archive, remove old segments, forget idle users."""
    if tag:  # a server's log, and not a person, reads what this prints
        configure_logging(logging.INFO)
    settings, folder = read_published_settings(repo), find_store(repo)
    retention = Retention(**{field.name: getattr(settings, field.name) for field in fields(Retention)})
    with lock(folder, wait=True), closing(open_writer(folder, repo)) as writer:  # `live share` may hold it for a moment
        served = generation or read_pinned_generation(repo)
        clock_ms, known = read_clock_ms(repo, served), open_generation(repo, served)
        result = maintain_store(writer, retention, time.time_ns() // 1_000_000, clock_ms, known)
        merged = merge_exposures(folder, time.time_ns() // 1_000_000)
    counts = (
        f"{result.archived:,} events moved into {len(result.written)} segments, {len(result.dropped)} segments removed, "
        f"{result.evicted:,} idle users forgotten, {result.surpassed:,} of whom the generation knows more, "
        f"{merged:,} files of answers merged"
    )
    if tag:
        print_json_line("INFO", "live.maintenance", counts)
    else:
        out.print(counts)


@app.command()
def consume(
    generation: Annotated[int, typer.Argument(help="generation whose settings apply")],
    repo: Repo = DEFAULT,
    tag: Annotated[str, typer.Option(help="marks this process, so that its server finds it")] = "",
) -> None:
    """Read events from Kafka into the store until SIGTERM; `live.brokers` and `live.topic` of the export name them."""
    configure_logging(logging.INFO)
    with closing(open_observe(repo, generation)) as observe:
        settings = observe.settings
        if not settings.brokers:
            raise ConfigError("The export names no Kafka brokers. Set [live] brokers, and export again.")
        changes = ChangeAdmission(settings.columns, settings.roles)
        decoder = MessageDecoder(observe.admission, changes, observe.info.spec.inputs, observe.writer.codes)
        EventConsumer(observe.writer, decoder, settings.brokers, settings.topic).run(stop_on_signals())


@app.command()
def share(
    generation: Annotated[int, typer.Argument(help="generation whose settings apply")],
    repo: Repo = DEFAULT,
    tag: Annotated[str, typer.Option(help="marks this process, so that its server finds it")] = "",
) -> None:
    """Share the state of users and items in Redis until SIGTERM; `live.redis` of the export names its nodes."""
    configure_logging(logging.INFO)
    with closing(open_observe(repo, generation)) as observe:
        info = observe.info
        if not info.live_redis:
            raise ConfigError("The export names no Redis. Set [live] redis, and export again.")
        with closing(RedisState(info.live_redis, info.live_project, PATIENT_S)) as state:
            Sharer(observe.writer, state, observe.settings.idle_days, observe.settings.session_hours).run(stop_on_signals())


@app.command()
def export(
    target: Annotated[Path, typer.Argument(help="Parquet file to write", resolve_path=True)],
    repo: Repo = DEFAULT,
    after: Annotated[
        int, typer.Option(min=0, max=LAST_SEQUENCE, help="only events after this sequence, or place in the log")
    ] = 0,
) -> None:
    """Write the whole log, archive and store, into one Parquet file that its owner alone may read."""
    folder = find_store(repo)
    count = export_log(folder, target, find_log_place(folder, after))
    out.print(f"{count:,} events written to {target}")


@app.command()
def erase(
    user: Annotated[str | None, typer.Argument(help="the user, as the shop writes it")] = None,
    repo: Repo = DEFAULT,
    session: Annotated[str | None, typer.Option(help="instead of a user, a visitor by the name of the session")] = None,
) -> None:
    """Erase a user or visitor from the store, the archive and Redis, search for remains, and keep the result as proof.

    Exit code 1 when neither these nor the pinned generation know anything of the user, as after a typing error.
    """
    if user is not None and session is None:
        user_id, described = find_user_id(repo, user), f"user {user!r}"
    elif session is not None and user is None:
        user_id, described = session_id(session), f"session {session!r}"
    else:
        raise ConfigError("Expected either a user or --session, to erase one of them at a time.")
    folder, shared = find_store(repo), open_shared_state(repo)
    with closing(open_writer(folder, repo)) as writer:
        erasure, counters = erase_user(writer, user_id, shared), writer.store.read_counters()
    out.print(f"removed: {describe_counts(erasure.removed)}")
    out.print(f"left: {describe_counts(erasure.left)}")
    if "redis_seen_ms" in counters and not shared:
        out.print(
            f"warning: this store was shared in Redis, and the pinned generation of {repo} names none. What Redis has of "
            f"{described} is still there: erase again with a repository that names it, or remove the key."
        )
    is_unknown = False
    if is_learned(repo, user_id):
        out.print(f"The pinned generation learned from events of {described}: export again, from a data set that has none.")
    elif is_unknown := not any(erasure.removed.values()):
        out.print(f"warning: nothing was known of {described}. Is that the id as the shop writes it?")
    if abandoned := remove_abandoned(repo):  # last, because only their owner may be able to remove them
        out.print(f"removed: {abandoned} folders that killed exports or rounds of `export follow` left, with events of users")
    if left := remove_left_scratch():
        out.print(f"removed: {left} temporary folders that killed exports and others left, perhaps with events of users")
    if is_unknown:
        raise typer.Exit(1)


@app.command()
def forget(
    item: Annotated[list[str] | None, typer.Option(help="forget all columns of this item, as the shop writes it")] = None,
    items_before: Annotated[
        datetime | None, typer.Option(help="or the columns of all items that were set before this moment, in UTC")
    ] = None,
    repo: Repo = DEFAULT,
) -> None:
    """Forget columns of items that upsert has set, such as prices that a newer data set has too. Then export.

    Exit code 1 when an item had none.
    """
    if bool(item) == bool(items_before):
        raise ConfigError("Expected either --item, which may be repeated, or --items-before.")
    before_ms = 1_000 * calendar.timegm(items_before.utctimetuple()) if items_before else ALWAYS_MS
    if items_before and 1_000_000 * before_ms > time.time_ns():
        raise ConfigError(
            f"--items-before is {items_before}, which is in the future, so every column of every item would be forgotten. "
            "Expected the time at which the newer data set was written, in UTC."
        )
    item_ids = {name: find_item_id(repo, name) for name in item or ()}
    with closing(open_writer(find_store(repo), repo)) as writer:
        forgotten = forget_items(writer, list(item_ids.values()) if item else None, before_ms)
    out.print(f"columns forgotten: {describe_counts(Counter(chain.from_iterable(forgotten.values())))}")
    if without := [name for name, item_id in item_ids.items() if item_id not in forgotten]:
        out.print(f"warning: upsert has set no column of {', '.join(without)}. Are these the ids as the shop writes them?")
    if forgotten:
        out.print(
            "A running server keeps the forgotten values until it loads another generation, so export now. A server that "
            "starts before that answers with the values of the last export."
        )
    if without:
        raise typer.Exit(1)


@app.command()
def backup(
    folder: Annotated[Path, typer.Argument(help="new or empty folder, best on another disk", resolve_path=True)],
    repo: Repo = DEFAULT,
) -> None:
    """Copy the live store, its archive, rules and exposure log into a folder. The server may keep running."""
    result = back_up(find_store(repo), folder)
    out.print(
        f"{result.bytes:,} bytes written to {folder}: events up to place {result.progress.last_sequence:,} of the log, "
        f"the latest of {format_time(result.progress.latest_ms)}, {result.segments} segments of the archive"
    )


@app.command()
def restore(
    folder: Annotated[Path, typer.Argument(help="folder that `backup` wrote", resolve_path=True)],
    repo: Repo = DEFAULT,
    replace: Annotated[
        bool, typer.Option("--replace", help="replace the store that is there, and keep it in a folder inside the new one")
    ] = False,
) -> None:
    """Restore a backup as the live store of a repository. Stop the server first."""
    target, shop = find_live_place(repo)
    result = restore_backup(folder, target, shop, replace)
    out.print(
        f"{target} holds the events up to place {result.progress.last_sequence:,} of the log, the latest of "
        f"{format_time(result.progress.latest_ms)}"
    )
    if result.erased:
        out.print(f"erased again, because they were erased after the backup: {result.erased:,} users")
    if result.replaced:
        former, now = (read_current_version(store / RULES) for store in (result.replaced, target))
        if former and former != now:
            out.print(
                f"the rules are those of the backup again ({f'version {now}' if now else 'as exported'}), and were version "
                f"{former}, which is in {result.replaced / RULES / str(former)}. Apply them again: python -m server rules apply"
            )
        out.print(f"the store that was there is in {result.replaced}. Remove it when nobody needs it: erasures do not reach it")


def find_live_place(repo: Path) -> tuple[Path, str]:
    """Return the folder of a repository's live store, and the name of its data set, "" for an unknown one."""
    try:
        info = read_stage(find_stage_folder(repo, OBSERVE, read_pinned_generation(repo)))
    except RecommenderError:  # a store outlives its repository
        return find_live_folder(repo), ""
    return find_live_folder(repo, info.live_folder), info.shop


def find_store(repo: Path) -> Path:
    """Return the folder of a repository's live store.

    Raises ConfigError where there is none, DependencyError where no command could open it, because a process hangs that writes.
    """
    folder, _ = find_live_place(repo)
    if not Reader(folder).exists():
        raise ConfigError(
            f"There is no live store in {folder}. A server makes it when it starts on the repository. Name another with --repo."
        )
    wait_for_writers(folder)
    return folder


def open_observe(repo: Path, generation: int) -> Observe:
    """Open `observe` of a generation, and with it the live store, which is made if there is none.

    Raises DependencyError where the store cannot be opened, because a process hangs that writes.
    """
    stage_folder = find_stage_folder(repo, OBSERVE, generation)
    folder = find_live_folder(repo, read_stage(stage_folder).live_folder)
    if Reader(folder).exists():
        wait_for_writers(folder)
    return Observe.load(stage_folder)


def read_published_settings(repo: Path) -> LiveSettings:
    """Return the settings of a repository's `observe`. Raises ArtifactError when it has none."""
    folder = find_stage_folder(repo, OBSERVE, read_pinned_generation(repo))
    return make_stage_settings(folder, read_stage(folder), LiveSettings)


def find_clock_ms(repo: Path) -> int | None:
    """Return the clock of the pinned generation, in unix milliseconds; None where it cannot be read."""
    try:
        return read_clock_ms(repo, read_pinned_generation(repo))
    except RecommenderError:  # a store outlives its repository
        return None


def read_clock_ms(repo: Path, generation: int) -> int:
    """Return the clock of a generation, in unix milliseconds. Raises ArtifactError."""
    folder = find_stage_folder(repo, STAGES[1], generation)
    return 1_000 * read_stage(folder).settings["as_of_s"]


def open_generation(repo: Path, generation: int) -> GenerationSeeds | None:
    """Open what a generation knows of users; None where machines share users, whose records are then in Redis."""
    is_shared = read_stage(find_stage_folder(repo, OBSERVE, generation)).live_redis
    return None if is_shared else Observe.open_seeds(repo, generation)


def open_shared_state(repo: Path) -> RedisState | None:
    """Open the Redis cluster that shares a repository's users. Return None where they are not shared."""
    try:
        info = read_stage(find_stage_folder(repo, OBSERVE, read_pinned_generation(repo)))
    except RecommenderError:  # a store outlives its repository
        return None
    return RedisState(info.live_redis, info.live_project, PATIENT_S) if info.live_redis else None


def open_writer(folder: Path, repo: Path) -> Writer:
    """Open a store for writing, with the layout and the event names that it has, and the settings of the repository."""
    try:
        settings = read_published_settings(repo).writer_settings
    except RecommenderError:  # a store outlives its repository
        settings = WriterSettings()
    opened = closing(open_store(folder, settings.store_bytes))
    with opened as store, closing(Reader(folder)) as reader, reader.snapshot() as snapshot:
        return Writer(folder, store.read_layout(), snapshot.read_event_names(), settings=settings)


if __name__ == "__main__":
    run_program(app)
