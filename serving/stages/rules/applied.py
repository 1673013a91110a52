"""Read the rules that were applied to a published generation (`python -m server rules apply`), for its stages.

    <live store>/rules/current.json              the version in use
    <live store>/rules/<version>/version.json   the rules as they were written
    <live store>/rules/<version>/<catalogue>/    compiled against a generation's catalogue (`name_catalogue`)

If the current version does not fit a generation, that generation uses the latest earlier version that was compiled for it. If
there is none, it uses the rules that it was exported with.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import InitVar, dataclass, field
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import numpy as np

from serving.contract.errors import ArtifactError

AnyRules = TypeVar("AnyRules", bound="CompiledRules")


class CompiledRules(Protocol):
    """The rules in the form that a process needs. Not all need the compiled loops, which take 70 MB."""

    @classmethod
    def load(cls: type[AnyRules], folder: Path, generation: int) -> AnyRules:
        """Read them. Raises ArtifactError."""

    @property
    def n_items(self) -> int:
        """The number of items that they were compiled for."""


FOLDER, CURRENT_FILE = "rules", "current.json"


def read_current_version(folder: Path) -> int:
    """Return the version in use, 0 where none was applied. Raises ArtifactError. folder: that of the rules"""
    path = folder / CURRENT_FILE
    try:
        return int(json.loads(path.read_text())["version"])
    except FileNotFoundError:
        return 0
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise make_unreadable(path, error) from error


def name_catalogue(generation: int, item_ids: np.ndarray) -> str:
    """Return the folder name of rules that were compiled for a generation. item_ids: int64 [n_known], its items by position

    Repositories that share a live store, and one that was made again, have generations of equal number and other items.
    """
    digest = hashlib.sha256(item_ids.astype(np.int64).tobytes()).hexdigest()
    return f"{generation}-{digest[:16]}"


def make_unreadable(path: Path, error: Exception) -> ArtifactError:
    """Return the error for a file of rules that cannot be read, often because root applied them for another user's server."""
    return ArtifactError(
        f"{path} cannot be read: {error}. Expected rules that the server's user may read. "
        "Give their folder to that user (`chown -R`), or apply the rules again as that user."
    )


@dataclass
class AppliedRules(Generic[AnyRules]):
    """Follows the current version for one generation.

    folder: that of the rules; item_ids: int64 [n_known], the generation's items; exported: rules of the generation itself
    """

    folder: Path
    generation: int
    item_ids: InitVar[np.ndarray]
    exported: AnyRules
    _catalogue: str = field(default="", init=False)
    _stamp: tuple[int, int] = field(default=(0, 0), init=False)
    _current: str = field(default="", init=False)  # a text, because every answer looks at it

    def __post_init__(self, item_ids: np.ndarray) -> None:
        self._catalogue = name_catalogue(self.generation, item_ids)
        self._current = str(self.folder / CURRENT_FILE)

    def read_if_new(self) -> AnyRules | None:
        """Return the rules to use from now on, None when they have not changed since the last call. Raises ArtifactError."""
        try:
            facts = os.stat(self._current)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise make_unreadable(Path(self._current), error) from error
        stamp = (facts.st_ino, facts.st_mtime_ns)
        if stamp == self._stamp:
            return None
        numbers = range(read_current_version(self.folder), 0, -1)
        fitting = (self.folder / str(number) / self._catalogue for number in numbers)
        compiled = next((folder for folder in fitting if folder.is_dir()), None)
        rules = self.exported if compiled is None else type(self.exported).load(compiled, self.generation)
        if rules.n_items != self.exported.n_items:
            raise ArtifactError(
                f"{compiled} has rules for {rules.n_items} items; expected {self.exported.n_items}. Apply again."
            )
        self._stamp = stamp
        return rules
