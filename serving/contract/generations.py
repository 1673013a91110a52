"""Read which generation a repository is pinned to, without a protobuf library, so that serving needs none.

`recommend/config.pbtxt` states it in its version policy and in the model versions of its steps. repository/generations.py
writes both. The pinned generation need not be the newest one on disk, for instance after a rollback.
"""

from __future__ import annotations

import re
from pathlib import Path

from serving.contract.errors import ArtifactError
from serving.contract.tensors import ENSEMBLE

COMMENT = re.compile(r"#.*")
PINS = (
    re.compile(r"\bversion_policy\s*:?\s*\{\s*specific\s*:?\s*\{([^}]*)\}"),
    re.compile(r"\bmodel_version\s*:\s*(\d+)"),
)


def read_pinned_generation(repository: Path) -> int:
    """Return the generation that `recommend` answers with. Raises ArtifactError unless its config names exactly one."""
    path = repository / ENSEMBLE / "config.pbtxt"
    try:
        text = COMMENT.sub("", path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ArtifactError(
            f"{path} cannot be read: {reason}; it states the generation that the repository answers with. "
            f"Create a repository with `make export REPO={repository}`."
        ) from error
    pins = {int(number) for pattern in PINS for pin in pattern.findall(text) for number in re.findall(r"\d+", pin)}
    if len(pins) != 1:
        raise ArtifactError(
            f"{path} is pinned to versions {sorted(pins)}; expected one for the model and all its steps. "
            f"Choose one with `python -m export pin GENERATION --repo {repository}`."
        )
    return pins.pop()
