"""Apply rules to the published generations without training: each version takes effect at once, and can be reverted.

A version is compiled for every generation of the repository, because others than the pinned one may serve too: after an
export, after `activate`, or as a challenger.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from repository.checks.finding import Finding, make_finding
from repository.generations import list_published_generations
from repository.owner import copy_owner
from repository.rules import compile_rules, find_misfits, insert_rows
from serving.contract.artifacts import find_stage_folder, open_array, read_json, read_stage
from serving.contract.durable import make_durable
from serving.contract.errors import ArtifactError, ConfigError
from serving.contract.generations import read_pinned_generation
from serving.contract.locks import hold_lock
from serving.contract.tensors import ENSEMBLE
from serving.live.events import ITEM_CHANGED
from serving.live.reader import Reader
from serving.live.store import find_live_folder, make_folder
from serving.stages.rules.applied import CURRENT_FILE, FOLDER, name_catalogue, read_current_version
from serving.stages.rules.config import CONFIG_FILE, ITEMS_FILE, RulesConfig, list_wire_ids

if TYPE_CHECKING:
    from serving.stages.features.ids import ItemIndex

log = logging.getLogger(__name__)

VERSION_FILE, PRICES_FILE, NAMES_FILE = "version.json", "prices.npy", "item_names.json"
KEPT_COMPILED = 2  # for each generation


@dataclass(frozen=True)
class Version:
    """One version of a shop's rules.

    values: the rules as they were written; shop: name of the data set; generation: the pinned one, whose catalogue they fit
    applied_s: unix seconds; misfits: number of another generation -> why they were not compiled for it
    repeats: number of the earlier version whose rules these are, 0 for new rules
    """

    number: int
    values: dict[str, Any]
    note: str
    shop: str
    generation: int
    applied_s: float
    misfits: dict[str, str] = field(default_factory=dict)
    repeats: int = 0

    @property
    def original(self) -> int:
        """The number under which these rules were first applied."""
        return self.repeats or self.number

    @classmethod
    def read(cls, folder: Path) -> Version:
        """Read what `add_version` wrote. Raises ArtifactError."""
        try:
            return cls(**read_json(folder, VERSION_FILE))
        except TypeError as error:
            raise ArtifactError(
                f"{folder / VERSION_FILE} does not describe rules as this version of the project does ({error}). Use the one "
                f"that wrote it, or move {folder.parent} away and apply the rules again."
            ) from error


def find_rules_folder(repository: Path) -> Path:
    """Return the folder of the versions: in the live store, which belongs to the shop and not to a generation."""
    info = read_stage(find_stage_folder(repository, "rerank", read_pinned_generation(repository)))
    return find_live_folder(repository, info.live_folder) / FOLDER


def find_rule_errors(repository: Path, values: Mapping[str, Any]) -> list[Finding]:
    """Return an error for each rule that is malformed or does not fit the pinned generation. values: the keys of [rules]"""
    findings = []
    for key, value in values.items():
        try:
            RulesConfig.from_dict({key: value})
        except ConfigError as error:
            findings.append(make_finding("error", key, str(error).removeprefix("rules: ")))
    if not findings:
        catalogue = read_catalogue(repository, read_pinned_generation(repository))
        messages = find_misfits(RulesConfig.from_dict(values), **catalogue)
        findings = [make_finding("error", "rules", message.removeprefix("rules: ")) for message in messages]
    return findings


def find_unknown_items(repository: Path, values: Mapping[str, Any]) -> list[str]:
    """Return the blocked and pinned items, as text, that neither the pinned generation nor an `upsert` knows."""
    rules, catalogue = RulesConfig.from_dict(values), read_catalogue(repository, read_pinned_generation(repository))
    known_ids, names = set(catalogue["item_ids"].tolist()), catalogue["item_names"] or {}
    with closing(Reader(find_rules_folder(repository).parent)) as reader:
        if reader.exists():
            with reader.snapshot() as snapshot:
                known_ids |= {change.id for change in snapshot.read_changes(after=0) if change.type == ITEM_CHANGED}
    item_ids = [*rules.blocked_items, *(pin.item_id for pin in rules.pinned)]
    return list(
        dict.fromkeys(
            str(item_id) for item_id in item_ids if str(item_id) not in names and known_ids.isdisjoint(list_wire_ids(item_id))
        )
    )


def apply_rules(repository: Path, values: Mapping[str, Any], note: str = "", repeats: int = 0) -> Version:
    """Compile rules against the published generations and put them into effect. Return their version.

    The first time, the rules that the pinned generation was exported with become version 1.
    Raises ConfigError for rules that do not fit the pinned generation. Another generation that they do not fit keeps the rules
    that it has (`Version.misfits`).

    values: the keys of [rules]; repeats: number of the earlier version that they are taken from, 0 for new rules
    """
    generation, folder = read_pinned_generation(repository), find_rules_folder(repository)
    if not folder.parent.exists():
        make_folder(folder.parent)
        copy_owner(folder.parent, repository)
    make_folder(folder)
    copy_owner(folder, folder.parent)
    exported = find_stage_folder(repository, "rerank", generation)
    with hold_lock(folder / "lock"):
        copy_owner(folder / "lock", folder.parent)
        if not list_versions(folder):
            config = json.loads((exported / CONFIG_FILE).read_text(encoding="utf-8"))
            add_version(repository, folder, generation, config, "as exported")
        version = add_version(repository, folder, generation, values, note, repeats)
        switch_to(folder, version.number)
        drop_compiled(folder)
    return version


def revert_rules(repository: Path, number: int | None = None) -> Version:
    """Apply an earlier version again. Raises ConfigError if there is none.

    number: the version; by default the one that was in effect before the current rules were first applied, so that each further
        call goes one step further back
    """
    folder = find_rules_folder(repository)
    versions = {version.number: version for version in list_versions(folder)}
    if number is None and not versions:
        raise ConfigError(f"No rules were applied to {repository}. Apply some first: python -m server rules apply FILE")
    if number is None:
        current = versions.get(read_current_version(folder))
        original = current.original if current else 0
        if original - 1 not in versions:
            raise ConfigError(f"No rules were in effect before version {original}. Name one of `python -m server rules list`.")
        number = versions[original - 1].original
    if number not in versions:
        numbers = ", ".join(map(str, versions)) or "none"
        raise ConfigError(f"There is no version {number} of the rules; there are {numbers}. See `python -m server rules list`.")
    return apply_rules(repository, versions[number].values, f"version {number} again", versions[number].original)


def list_versions(folder: Path) -> list[Version]:
    """Return all versions, the oldest first."""
    folders = [path for path in folder.glob("*") if path.name.isdecimal()]
    return sorted((Version.read(path) for path in folders), key=lambda version: version.number)


def read_current_values(folder: Path, shop: str) -> dict[str, Any] | None:
    """Return a shop's current rules as they were written; None if none were applied. folder: of `find_rules_folder`"""
    number = read_current_version(folder)
    version = Version.read(folder / str(number)) if number else None
    return version.values if version and version.shop == shop else None


def add_version(
    repository: Path, folder: Path, generation: int, values: Mapping[str, Any], note: str, repeats: int = 0
) -> Version:
    """Write the next version, complete or not at all, and return it once it is durable. It is not in effect yet.

    Raises ConfigError for rules that do not fit `generation`; the arguments are those of `apply_rules`
    """
    number = 1 + max((version.number for version in list_versions(folder)), default=0)
    shop = read_stage(find_stage_folder(repository, "rerank", generation)).shop
    staging = folder / f".{number}"
    shutil.rmtree(staging, ignore_errors=True)
    compile_for_generation(repository, staging, generation, values)
    misfits = {}
    for other in list_published_generations(repository):
        if other != generation:
            try:
                compile_for_generation(repository, staging, other, values)
            except (ConfigError, ArtifactError) as error:
                misfits[str(other)] = str(error).removeprefix("rules: ")
    version = Version(number, dict(values), note, shop, generation, time.time(), misfits, repeats)
    (staging / VERSION_FILE).write_text(json.dumps(vars(version), ensure_ascii=False, indent=1) + "\n")
    make_durable(staging / VERSION_FILE)
    make_durable(staging)
    copy_owner(staging, folder.parent)
    os.rename(staging, folder / str(number))
    return version


def compile_for_generation(repository: Path, version_folder: Path, generation: int, values: Mapping[str, Any]) -> None:
    """Compile rules for a generation into a folder of `version_folder`, durably, or not at all.

    Raises ConfigError where they do not fit, ArtifactError for a damaged generation.
    """
    # imported late: a server's supervisor imports this module too, and needs no compiled loops
    from serving.stages.rules.rules import Rules

    items = load_items(repository, generation)
    compiled = version_folder / name_catalogue(generation, items.ids)
    try:
        compile_rules(compiled, RulesConfig.from_dict(values), **read_catalogue(repository, generation))
        insert_rows(compiled / ITEMS_FILE, len(items.newcomers))
        Rules.load(compiled, generation)
        for path in (*compiled.iterdir(), compiled):
            make_durable(path)
    except BaseException:
        shutil.rmtree(compiled, ignore_errors=True)
        raise


def compile_current_rules(repository: Path) -> None:
    """Compile the current rules for the published generations that lack them.

    Rules may have changed while a generation was trained, and a live store may come from a backup or from another repository.
    If the current rules do not fit a generation, a warning is logged, and it keeps the rules that it has.
    """
    folder = find_rules_folder(repository)
    if not read_current_version(folder):
        return
    with hold_lock(folder / "lock"):
        number = read_current_version(folder)
        current, staging = Version.read(folder / str(number)), folder / f".{number}"
        shutil.rmtree(staging, ignore_errors=True)  # of a process that was killed
        for generation in list_published_generations(repository):
            try:
                if not is_compiled(repository, folder, generation, current):
                    compile_for_generation(repository, staging, generation, current.values)
            except (ConfigError, ArtifactError) as error:
                log.warning("generation %d keeps its rules, because version %d does not fit it: %s", generation, number, error)
        if staging.exists():
            copy_owner(staging, folder.parent)
            for path in staging.iterdir():
                os.rename(path, folder / str(number) / path.name)
            staging.rmdir()
            make_durable(folder / str(number))


def is_compiled(repository: Path, folder: Path, generation: int, version: Version) -> bool:
    """Return whether a generation has a version of the rules, or needs none: its export had the same, or it is another shop's.

    folder: that of the rules. Raises ConfigError and ArtifactError.
    """
    rerank = find_stage_folder(repository, "rerank", generation)
    name = name_catalogue(generation, load_items(repository, generation).ids)
    compiled = {path.parent.name for path in list_compiled(folder) if path.name == name}
    if version.shop != read_stage(rerank).shop or str(version.number) in compiled:
        return True
    exported = RulesConfig.load(rerank / CONFIG_FILE)
    return not compiled and exported == RulesConfig.from_dict(version.values)  # earlier rules would hold before exported ones


def load_items(repository: Path, generation: int) -> ItemIndex:
    """Return the items of a generation. Raises ArtifactError."""
    from serving.stages.features.ids import ItemIndex

    return ItemIndex.load(find_stage_folder(repository, "rerank", generation) / "item_ids.npy")


def drop_former_rules(repository: Path) -> None:
    """Remove what was compiled for generations that are gone, before the next one is published.

    A repository that was removed and made again counts from 1 anew, and its items may have other prices and categories than
    those of the former one. A live store in a folder of its own choice may serve other repositories too: it is left.
    """
    folder = find_live_folder(repository) / FOLDER
    if read_current_version(folder):
        with hold_lock(folder / "lock"):
            for path in list_compiled(folder):
                if not (repository / ENSEMBLE / path.name.partition("-")[0]).is_dir():
                    shutil.rmtree(path)


def drop_compiled(folder: Path) -> None:
    """Remove compiled rules that no process reads any more: all but the latest two of each generation.

    A process that just read which version is current may be opening the last but one. The caller holds the lock.
    """
    kept = Counter[str]()
    for path in sorted(list_compiled(folder), key=lambda path: int(path.parent.name), reverse=True):
        kept[path.name] += 1
        if kept[path.name] > KEPT_COMPILED:
            shutil.rmtree(path)


def list_compiled(folder: Path) -> list[Path]:
    """Return the folders of all versions with rules that were compiled for a generation."""
    return [path for path in folder.glob("*/*") if path.is_dir() and path.parent.name.isdecimal()]


def switch_to(folder: Path, number: int) -> None:
    """Put a version into effect, durably, by one rename, which running servers notice at their next request."""
    new = folder / f".{CURRENT_FILE}"
    new.write_text(json.dumps({"version": number}) + "\n")
    make_durable(new)
    copy_owner(new, folder.parent)
    os.rename(new, folder / CURRENT_FILE)
    make_durable(folder)


def read_catalogue(repository: Path, generation: int) -> dict[str, Any]:
    """Return a generation's catalogue as arguments of `compile_rules`. Raises ArtifactError."""
    from serving.stages.live.content import NO_GROUP, Content

    folder = find_stage_folder(repository, "rerank", generation)
    content, ids = Content.load(folder), load_items(repository, generation).ids
    names = find_stage_folder(repository, ENSEMBLE, generation) / NAMES_FILE
    category, provider = (
        [None if code == NO_GROUP else known[code] for code in codes.tolist()]
        for known, codes in zip(content.names, content.codes, strict=True)
    )
    return {
        "item_ids": np.asarray(ids),
        "category": category,
        "provider": provider,
        "price": np.load(folder / PRICES_FILE) if (folder / PRICES_FILE).exists() else None,
        "popularity": np.asarray(open_array(find_stage_folder(repository, "rank", generation), "popularity"))[: len(ids), 0],
        "items_returned": read_stage(folder).axes.items_returned,
        "item_names": json.loads(names.read_text()) if names.exists() else None,
    }
