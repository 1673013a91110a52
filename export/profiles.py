"""The profiles of an export, as plug-ins. Everything else is common to all profiles.

    log ─▶ features, models ─▶ staged stages, rehearsed ─▶ Profile.publish ─▶ repository ─▶ Profile.checks (`make check`)

A profile is a module with an object `PROFILE`. To add one, write it and name its module in PLUGINS.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from repository.checks.check import Check
from serving.contract.artifacts import MANIFEST_FILE, read_json
from serving.contract.errors import ConfigError, RecommenderError
from serving.contract.generations import read_pinned_generation
from serving.contract.tensors import ENSEMBLE, ModelSpec

if TYPE_CHECKING:  # `make check` must not import these
    from export.settings import Settings
    from repository.checks.recorded import Recorded
    from repository.publish import Staging

DEFAULT = "cpu"
PLUGINS = {DEFAULT: "export.cpu", "merlin": "export.nvidia.profile"}  # modules, imported on demand


@dataclass(frozen=True)
class Rehearsed:
    """A staged and rehearsed generation, which a profile publishes.

    repository: its destination as the caller named it, possibly a link
    workflow: folder of NVTabular's own workflow, where the profile keeps it
    """

    repository: Path
    staging: Staging
    specs: dict[str, ModelSpec]
    settings: Settings
    recorded: Recorded
    workflow: Path | None = None


class Profile(Protocol):
    """Layout, publication and checks of a generation."""

    layouts: Sequence[str]  # those that it can be published in
    serves_sequences: bool  # whether retrieval may have a sequence network
    own_model: str | None  # a model that only repositories of this profile have; None: there is none
    stays_writable: bool  # whether start scripts write into its repositories

    def keeps_workflow(self, settings: Settings) -> bool:
        """Return whether NVTabular's own workflow must be kept for publication."""

    def refuse_early(self, repository: Path, staging: Staging, specs: dict[str, ModelSpec], settings: Settings) -> None:
        """Raise ConfigError or ExportError, before training, for everything that `publish` would refuse."""

    def publish(self, rehearsed: Rehearsed, report: Callable[[str], None]) -> int:
        """Publish the generation, in place of the repository or beside its older generations. Return its number."""

    def list_checks(self) -> tuple[Sequence[Check], Sequence[Check]]:
        """Return the checks of its repositories, in order, and the decisive ones: after an error of one, no other runs."""

    def list_checked_by_format(self, repository: Path) -> Sequence[str]:
        """Return what could only be compared with a documented format, because the software that reads it is not here."""


def load_profile(name: str) -> Profile:
    """Return a profile by name. Raises ConfigError when there is none."""
    if name not in PLUGINS:
        raise ConfigError(f"There is no profile {name!r}. Available: {', '.join(PLUGINS)}.")
    return import_module(PLUGINS[name]).PROFILE


def find_profile_name(repository: Path) -> str:
    """Return the profile that a repository was exported for, by its manifest, or by its models where that cannot be read."""
    try:
        return read_json(repository / ENSEMBLE / str(read_pinned_generation(repository)), MANIFEST_FILE).get("profile", DEFAULT)
    except RecommenderError:
        own_models = {name: load_profile(name).own_model for name in PLUGINS}
        return next((name for name, model in own_models.items() if model and (repository / model).is_dir()), DEFAULT)
