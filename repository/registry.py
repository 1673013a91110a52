"""List a repository's generations, compare two of them, and keep an append-only record of what was done with them.

`<REPO>/registry.jsonl` has one line per act: when, who, what and why. Lines are only ever added; tritonserver ignores the file.
A full disk may cut a line short; the act is then reported as not recorded. The next act ends that line, and readers skip it.
"""

from __future__ import annotations

import errno
import fcntl
import getpass
import json
import logging
import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from repository.generations import SEALED, list_published_generations, read_published_s, require_published
from repository.owner import copy_owner
from repository.triton.models import hash_manifest
from serving.contract.artifacts import MANIFEST_FILE, find_stage_folder, read_json
from serving.contract.errors import ArtifactError, ConfigError, DependencyError
from serving.contract.generations import read_pinned_generation
from serving.contract.tensors import ENSEMBLE

log = logging.getLogger(__name__)

RECORD_FILE = "registry.jsonl"
VERDICTS = ("experiment stopped", "rolled back", "promoted", "not promoted")  # acts that end an experiment
CHOSEN = ("activated", "followed", "pinned")  # acts that choose a generation
GATE = ("published", "not published")  # acts that say where a generation came from, and what `follow` refused in its place
LATE = "recorded late: the publication ended before its record"
MANIFEST_SHA256 = "manifest_sha256"  # key of a publication's facts: of the generation's manifest.json, as it was published
REASON = "reason"  # key of a manifest: why `follow` published the generation
SERVER = "server"  # author of what a server does by itself
CUT_VALUES = ("true", "false", "null", "NaN", "-Infinity", "Infinity", ".", "e-", "e+")  # their beginnings are no JSON
# Keys of a manifest that differ between any two generations and say nothing about what they are like
NOT_COMPARED = (
    "stages",
    "generation",
    "schema",
    SEALED,
    REASON,
    MANIFEST_SHA256,
    "reports.preprocess_replay",
    "reports.onnx_parity",
)


@dataclass(frozen=True)
class Act:
    """One line of the record.

    author: a user, or "server" for what a server does by itself
    action: "tagged", "untagged", "activated" and "replaced" (of a running server's new and former generation, the latter with
        its drift), "followed" (in place of "activated", by a server that follows the pin), "pinned" (for the next start),
        "served" (by a server, the first time with a live store, which the facts name: server/status/store_place.py),
        "published" or "not published" (by `follow`, with its verdict as the reason; the generation is then the one that
        stays), or a change of an experiment, whose generation is the challenger (experiments.py)
    tag: "" unless one was set
    facts: of a publication: the generation's manifest without the list of its files, and the SHA-256 of the whole manifest,
        kept after the generation is removed; of a change of an experiment: its name ("experiment"), "mode" and "champion";
        {} of other acts
    """

    time_s: int
    author: str
    action: str
    generation: int
    tag: str = ""
    reason: str = ""
    facts: dict[str, Any] = field(default_factory=dict)


KEYS = {each.name for each in fields(Act)}


@dataclass(frozen=True)
class Entry:
    """A generation of a repository, for a list.

    pinned: whether a server starts with it; one that runs already may serve another
    log: facts of the interaction log; quality: the ranker's, by metric
    settings: those that differ from the generation before in the list, by key with dots; {} for the first one
    drift: of its requests, in words, when another generation last took its place; "" if none did
    verdicts: how its experiments as the challenger ended, in words, oldest first
    gate: where it came from or the verdict of `follow` on it, then those on candidates refused in its place, oldest first
    removed: whether its files are gone, so that only the record has it
    """

    generation: int
    pinned: bool
    published_s: int
    dataset: str
    log: dict[str, Any]
    quality: dict[str, float]
    tags: tuple[str, ...]
    settings: dict[str, Any]
    drift: str
    verdicts: tuple[str, ...]
    gate: tuple[str, ...]
    removed: bool


def record_publication(repo: Path, generation: int, reason: str) -> Act:
    """Append that a generation was published, with what `list`, `show` and `diff` need once it is removed.

    Raises DependencyError where it cannot be written, ConfigError, ArtifactError.
    """
    facts = read_published_facts(repo, generation) | {MANIFEST_SHA256: hash_manifest(repo, generation)}
    return record_act(repo, "published", generation, reason=reason, facts=facts)


def record_late(repo: Path, generations: Iterable[int]) -> None:
    """Append the publications of those of the generations that were not recorded, because their process ended before.

    A generation whose manifest cannot be read is left out. Raises DependencyError where nothing can be written, ConfigError.
    """
    published, recorded = set(list_published_generations(repo)), find_recorded(read_acts(repo))
    for generation in sorted(published.intersection(generations) - recorded.keys()):
        try:
            facts, published_s = read_published_facts(repo, generation), find_published_s(repo, generation)
        except ArtifactError as error:
            log.warning("the record will lack generation %d: %s", generation, error)
            continue
        reason = f"{facts[REASON]}; {LATE}" if REASON in facts else LATE
        record_act(repo, "published", generation, reason=reason, facts=facts, time_s=published_s)


def record_act(
    repo: Path,
    action: str,
    generation: int,
    tag: str = "",
    reason: str = "",
    facts: dict[str, Any] | None = None,
    author: str = "",
    time_s: int = 0,
) -> Act:
    """Append what was done, and return when it is on disk.

    author: "" is the user of this process; time_s: when it was done, unix seconds, 0 for now
    Raises DependencyError where it cannot be written.
    """
    act = Act(time_s or int(time.time()), author or find_author(), action, generation, tag, reason, facts or {})
    path, line = repo / RECORD_FILE, f"{json.dumps(asdict(act))}\n".encode()
    try:
        with open(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644), "r+b", buffering=0) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            size = file.seek(0, os.SEEK_END)
            if not size:
                copy_owner(path, repo)
            elif os.pread(file.fileno(), 1, size - 1) != b"\n":
                line = b"\n" + line
            if file.write(line) != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(file.fileno())
    except OSError as error:
        raise DependencyError(
            f"{path} cannot be written: {error.strerror}, so that it does not say {action!r} of generation {generation}. "
            "Free space, or make it writable for this user."
        ) from error
    return act


def find_author() -> str:
    """Return the name of this process's user, "uid N" without one: a container may run as any number."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # OSError from CPython 3.13 on
        return f"uid {os.getuid()}"


def read_acts(repo: Path) -> list[Act]:
    """Return the record, oldest first, without lines that were cut short.

    Raises ConfigError for others that are no record, and where there is no repository.
    """
    path = repo / RECORD_FILE
    if not repo.is_dir():
        raise ConfigError(f"There is no model repository at {repo}. Make one with `make export REPO={repo}`.")
    if not path.is_file():
        return []
    acts = []
    for number, encoded in enumerate(path.read_bytes().splitlines(), start=1):
        line = encoded.decode(errors="replace")
        try:
            record = json.loads(line)
            acts.append(Act(**{name: value for name, value in record.items() if name in KEYS}))  # newer versions may add keys
        except (ValueError, TypeError, AttributeError) as error:
            if isinstance(error, json.JSONDecodeError) and _is_cut_short(line, error):
                log.warning("%s, line %d was cut short, perhaps by a full disk, and is skipped: %s", path, number, line)
                continue
            raise ConfigError(
                f"{path}, line {number} is no record: {error}. Remove that line; without the file, no tag keeps a generation."
            ) from error
    return acts


def _is_cut_short(line: str, error: json.JSONDecodeError) -> bool:
    """Return whether a line is the beginning of a record: nothing in it is wrong but that it ends."""
    ends_in_escape = error.msg.startswith("Invalid \\u") and error.pos > len(line) - len("\\u0000")
    ends_in_value = any(value.startswith(line[error.pos :]) for value in CUT_VALUES)  # also where nothing of the value is left
    return line.startswith("{") and (ends_in_value or error.msg.startswith("Unterminated string") or ends_in_escape)


def find_unaccepted(acts: list[Act]) -> set[int]:
    """Return the generations that were the challenger of an experiment and that nobody has chosen since."""
    unaccepted: set[int] = set()
    for act in acts:
        is_emergency = act.action == "pinned" and act.author == SERVER  # it had damaged files, and not the choice
        if act.action == "promoted" or (act.action in CHOSEN and not is_emergency):
            unaccepted.discard(act.generation)
        elif act.action in VERDICTS or "experiment" in act.facts:
            unaccepted.add(act.generation)
    return unaccepted


def find_tags(acts: list[Act], generation: int) -> tuple[str, ...]:
    """Return the tags of a generation."""
    return tuple(sorted(tag for tag, holder in find_holders(acts).items() if holder == generation))


def find_holders(acts: list[Act]) -> dict[str, int]:
    """Return the generation of each tag. A tag belongs to one generation: setting it elsewhere moves it."""
    holders: dict[str, int] = {}
    for act in acts:
        if act.action == "tagged":
            holders[act.tag] = act.generation
        elif act.action == "untagged":
            holders.pop(act.tag, None)
    return holders


def list_generations(repo: Path) -> list[Entry]:
    """Return the published generations, and those that are removed but recorded, oldest first.

    One whose manifest is damaged is described as it was recorded, with a warning. Raises ConfigError, ArtifactError.
    """
    pinned, acts, published = read_pinned_generation(repo), read_acts(repo), list_published_generations(repo)
    recorded = find_recorded(acts)
    entries: list[Entry] = []
    before: dict[str, Any] | None = None
    for generation in sorted({*published, *recorded}):
        removed, facts = generation not in published, recorded[generation].facts if generation in recorded else {}
        manifest = facts if removed else read_manifest_or(facts, repo, generation)
        published_s = recorded[generation].time_s if removed else find_published_s(repo, generation)
        entries.append(describe_generation(generation, pinned, acts, manifest, before or manifest, published_s, removed))
        before = manifest
    return entries


def find_published_s(repo: Path, generation: int) -> int:
    """Return when a generation was published that is not removed, in whole unix seconds (see `read_published_s`)."""
    return int(read_published_s(find_stage_folder(repo, ENSEMBLE, generation)))


def find_recorded(acts: list[Act]) -> dict[int, Act]:
    """Return the publications that were recorded with facts, by generation."""
    return {act.generation: act for act in acts if act.action == "published" and act.facts}


def describe_generation(
    generation: int,
    pinned: int,
    acts: list[Act],
    manifest: dict[str, Any],
    before: dict[str, Any],
    published_s: int,
    removed: bool,
) -> Entry:
    """Return one entry of the list.

    pinned: the pinned generation; acts: the record; manifest, before: of this generation, and of the one before in the list
    published_s, removed: as of Entry
    """
    quality = manifest.get("reports", {}).get("validation", {}).get("ranker", {})
    name = manifest.get("dataset", {}).get("name", "")
    former = dict(_flatten(before.get("settings", {}), "settings"))
    settings = {
        key.removeprefix("settings."): value
        for key, value in _flatten(manifest.get("settings", {}), "settings")
        if former.get(key) != value
    }
    generation_acts = [act for act in acts if act.generation == generation]
    drift = next((act.reason for act in reversed(generation_acts) if act.action == "replaced"), "")
    verdicts = tuple(f"{act.action}: {act.reason}" for act in generation_acts if act.action in VERDICTS)
    return Entry(
        generation,
        generation == pinned,
        published_s,
        name,
        manifest.get("log", {}),
        quality,
        find_tags(acts, generation),
        settings,
        drift,
        verdicts,
        tuple(f"{act.action}: {act.reason}" for act in generation_acts if act.action in GATE and act.reason),
        removed,
    )


def read_manifest(repo: Path, generation: int) -> dict[str, Any]:
    """Return the manifest of a published generation. Raises ConfigError where it is not published, ArtifactError."""
    require_published(repo, generation)
    return read_json(find_stage_folder(repo, ENSEMBLE, generation), MANIFEST_FILE)


def read_manifest_or(facts: dict[str, Any], repo: Path, generation: int) -> dict[str, Any]:
    """Return the manifest of a published generation, `facts` with a warning where it cannot be read. Raises ConfigError."""
    try:
        return read_manifest(repo, generation)
    except ArtifactError as error:
        log.warning("generation %d is damaged: %s", generation, error)
        return facts


def read_facts(repo: Path, generation: int) -> dict[str, Any]:
    """Return the manifest of a generation without its files, and as `removed` whether only the record still has it.

    Raises ConfigError where it is neither published nor recorded, ArtifactError.
    """
    recorded = find_recorded(read_acts(repo)).get(generation)
    if recorded and generation not in list_published_generations(repo):
        return recorded.facts | {"removed": True}
    return read_published_facts(repo, generation) | {"removed": False}


def read_published_facts(repo: Path, generation: int) -> dict[str, Any]:
    """Return the manifest of a published generation without its files. Raises ConfigError, ArtifactError."""
    return {key: value for key, value in read_manifest(repo, generation).items() if key != "files"}


def diff_generations(repo: Path, one: int, other: int) -> dict[str, tuple[Any, Any]]:
    """Return what differs between two manifests: key with dots -> (value of one, value of the other), None where absent.

    Removed generations are compared as they were recorded. Raises ConfigError, ArtifactError.
    """
    flat = [dict(_flatten(read_facts(repo, generation))) for generation in (one, other)]
    keys = sorted(flat[0].keys() | flat[1].keys())
    return {key: (flat[0].get(key), flat[1].get(key)) for key in keys if flat[0].get(key) != flat[1].get(key)}


def _flatten(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            inner_path = f"{path}.{key}" if path else key
            if inner_path not in NOT_COMPARED:
                yield from _flatten(inner, inner_path)
    else:
        yield path, value
