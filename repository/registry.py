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
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from repository.generations import list_published_generations
from serving.contract.artifacts import MANIFEST_FILE, find_stage_folder, read_json
from serving.contract.errors import ConfigError, DependencyError
from serving.contract.generations import read_pinned_generation
from serving.contract.tensors import ENSEMBLE

log = logging.getLogger(__name__)

RECORD_FILE = "registry.jsonl"
VERDICTS = ("experiment stopped", "rolled back", "promoted", "not promoted")  # acts that end an experiment
# Keys of a manifest that differ between any two generations and say nothing about what they are like
NOT_COMPARED = ("files", "stages", "generation", "schema", "reports.preprocess_replay", "reports.onnx_parity")


@dataclass(frozen=True)
class Act:
    """One line of the record.

    action: "tagged", "untagged", "activated" and "replaced" (of a running server's new and former generation, the latter with
        its drift), "pinned" (for the next start), "published" or "not published" (by `follow`, with its verdict as the reason;
        the generation is then the one that stays), or a change of an experiment, whose generation is the challenger
        (experiments.py)
    tag: "" unless one was set
    """

    time_s: int
    author: str
    action: str
    generation: int
    tag: str = ""
    reason: str = ""


@dataclass(frozen=True)
class Entry:
    """A generation of a repository, for a list.

    pinned: whether a server starts with it; one that runs already may serve another
    log: facts of the interaction log; quality: the ranker's, by metric
    settings: those that differ from the generation before in the list, by key with dots; {} for the first one
    drift: of its requests, in words, when another generation last took its place; "" if none did
    verdicts: how its experiments as the challenger ended, in words, oldest first
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


def record_act(repo: Path, action: str, generation: int, tag: str = "", reason: str = "") -> Act:
    """Append what was done, and return when it is on disk. The author is the user of this process.

    Raises DependencyError where it cannot be written.
    """
    act = Act(int(time.time()), find_author(), action, generation, tag, reason)
    path, line = repo / RECORD_FILE, f"{json.dumps(asdict(act))}\n".encode()
    try:
        with open(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644), "r+b", buffering=0) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            if file.seek(0, os.SEEK_END) and os.pread(file.fileno(), 1, file.tell() - 1) != b"\n":
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
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        try:
            acts.append(Act(**json.loads(line)))
        except (ValueError, TypeError) as error:
            if isinstance(error, json.JSONDecodeError) and _is_cut_short(line, error):
                log.warning("%s, line %d was cut short, perhaps by a full disk, and is skipped: %s", path, number, line)
                continue
            raise ConfigError(f"{path}, line {number} is no record: {error}. Move the file away to start a new one.") from error
    return acts


def _is_cut_short(line: str, error: json.JSONDecodeError) -> bool:
    """Return whether a line is the beginning of a record: nothing in it is wrong but that it ends."""
    ends_in_escape = error.msg.startswith("Invalid \\u") and error.pos > len(line) - len("\\u0000")
    return line.startswith("{") and (error.pos == len(line) or error.msg.startswith("Unterminated string") or ends_in_escape)


def find_tags(acts: list[Act], generation: int) -> tuple[str, ...]:
    """Return the tags of a generation. A tag belongs to one generation: setting it elsewhere moves it."""
    holders: dict[str, int] = {}
    for act in acts:
        if act.action == "tagged":
            holders[act.tag] = act.generation
        elif act.action == "untagged":
            holders.pop(act.tag, None)
    return tuple(sorted(tag for tag, holder in holders.items() if holder == generation))


def list_generations(repo: Path) -> list[Entry]:
    """Return the published generations, oldest first. Raises ConfigError, ArtifactError."""
    pinned, acts, published = read_pinned_generation(repo), read_acts(repo), list_published_generations(repo)
    manifests = [read_manifest(repo, generation) for generation in published]
    before = [manifests[0], *manifests]
    return [
        describe_generation(repo, generation, pinned, acts, *pair)
        for generation, *pair in zip(published, manifests, before, strict=False)
    ]


def describe_generation(
    repo: Path, generation: int, pinned: int, acts: list[Act], manifest: dict[str, Any], before: dict[str, Any]
) -> Entry:
    """Return one entry of the list.

    pinned: the pinned generation; acts: the record; before: manifest of the generation before
    """
    published_s = int((find_stage_folder(repo, ENSEMBLE, generation) / MANIFEST_FILE).stat().st_mtime)
    quality = manifest.get("reports", {}).get("validation", {}).get("ranker", {})
    name = manifest.get("dataset", {}).get("name", "")
    former = dict(_flatten(before.get("settings", {}), "settings"))
    settings = {
        key.removeprefix("settings."): value
        for key, value in _flatten(manifest.get("settings", {}), "settings")
        if former.get(key) != value
    }
    own = [act for act in acts if act.generation == generation]
    drift = next((act.reason for act in reversed(own) if act.action == "replaced"), "")
    verdicts = tuple(f"{act.action}: {act.reason}" for act in own if act.action in VERDICTS)
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
    )


def read_manifest(repo: Path, generation: int) -> dict[str, Any]:
    """Return the manifest of a published generation. Raises ConfigError where it is not published, ArtifactError."""
    published = list_published_generations(repo)
    if generation not in published:
        raise ConfigError(f"Generation {generation} is not in {repo}, which holds {list(published)}.")
    return read_json(find_stage_folder(repo, ENSEMBLE, generation), MANIFEST_FILE)


def diff_generations(repo: Path, one: int, other: int) -> dict[str, tuple[Any, Any]]:
    """Return what differs between two manifests: key with dots -> (value of one, value of the other), None where absent."""
    flat = [dict(_flatten(read_manifest(repo, generation))) for generation in (one, other)]
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
