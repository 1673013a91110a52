"""Read the rules that were applied to a published generation (`python -m server rules apply`), for its stages.

    <live store>/rules/current.json              the version in use
    <live store>/rules/<version>/version.json   the rules as they were written
    <live store>/rules/<version>/<generation>/   compiled against a generation's catalogue, as in its version folder

If the current version does not fit a generation, that generation uses the latest earlier version that was compiled for it. If
there is none, it uses the rules that it was exported with.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, Protocol, TypeVar

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


def make_unreadable(path: Path, error: Exception) -> ArtifactError:
    """Return the error for a file of rules that cannot be read, often because root applied them for another user's server."""
    return ArtifactError(
        f"{path} cannot be read: {error}. Expected rules that the server's user may read. "
        "Give their folder to that user (`chown -R`), or apply the rules again as that user."
    )


@dataclass
class AppliedRules(Generic[AnyRules]):
    """Follows the current version for one generation. folder: that of the rules; exported: rules of the generation itself"""

    folder: Path
    generation: int
    exported: AnyRules
    _stamp: tuple[int, int] = field(default=(0, 0), init=False)
    _current: str = field(default="", init=False)  # a text, because every answer looks at it

    def __post_init__(self) -> None:
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
        fitting = (self.folder / str(number) / str(self.generation) for number in numbers)
        compiled = next((folder for folder in fitting if folder.is_dir()), None)
        rules = self.exported if compiled is None else type(self.exported).load(compiled, self.generation)
        if rules.n_items != self.exported.n_items:
            raise ArtifactError(
                f"{compiled} has rules for {rules.n_items} items; expected {self.exported.n_items}. Apply again."
            )
        self._stamp = stamp
        return rules
