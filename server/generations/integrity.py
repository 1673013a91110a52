"""Compare the files of a served generation with their manifests, again and again, at little cost.

    every look   size and times of all files (a stat each); a file that differs is read at once
                 and HASH_BLOCK_BYTES of them are read, in turn: damage that leaves no trace is found within minutes

The stages verify every file when they load. Afterwards they read mapped pages, which change when somebody writes to the file.
"""

from __future__ import annotations

import hashlib
from collections.abc import Generator, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from repository.challenger import read_challengers
from repository.file_stamps import read_stamp
from repository.generations import list_published_generations
from repository.registry import find_unaccepted, read_acts
from repository.triton.models import check_backends, read_published_digests, read_repository
from serving.contract.artifacts import HASH_BLOCK_BYTES, MANIFEST_FILE, REMEDY, compute_sha256, load_manifest
from serving.contract.errors import ArtifactError, RecommenderError
from serving.contract.generations import read_pinned_generation
from serving.contract.tensors import CHALLENGER

MEND = "Put the files back as they were published, or export the repository again (`make export`)"


class PublishedFile(NamedTuple):
    path: Path
    sha256: str


class ArtifactCheck:
    """Compares the files of one generation with its manifests. A model without a manifest has no files to compare."""

    def __init__(self, repo: Path, generation: int) -> None:  # 0: of a repository that is not ours; there is nothing to compare
        self.repo, self.generation = repo, generation
        # Without the challenger's folder: in the fused layout it is a link to the same files.
        folders = sorted(folder for folder in repo.glob(f"*/{generation}") if folder.parent.name != CHALLENGER)
        self._files: list[PublishedFile] = []
        try:
            digests = read_published_digests(repo, generation)
            self._files = [file for folder in folders for file in _list_files(folder, digests)]
            listed = {file.path for file in self._files}
            self._files += [PublishedFile(path, digest) for path, digest in digests.items() if digest and path not in listed]
            self._unreadable = self._find_removal()
        except (ArtifactError, OSError) as error:  # OSError: a file was removed meanwhile
            self._files, self._unreadable = [], str(error).removesuffix(REMEDY).rstrip(" .")
        self._stamps = {file.path: read_stamp(file.path) for file in self._files}
        self._reading = self._read_in_turn()

    @property
    def mapped(self) -> list[Path]:
        """The files that stages map: their arrays."""
        return [file.path for file in self._files if file.path.suffix == ".npy"]

    def look(self) -> str:
        """Return the first fault found: a file that is not as it was published, and why; "" without one."""
        if fault := self._unreadable or self._find_removal():
            return fault
        for file in self._files:
            stamp = read_stamp(file.path)
            if stamp == self._stamps[file.path]:
                continue
            if fault := _find_fault(file):
                return fault
            self._stamps[file.path] = stamp  # touched, and still the same bytes
        return next(self._reading)

    def read_all(self) -> str:
        """Read every file. Return the first fault; "" without one."""
        return self._unreadable or self._find_removal() or next(filter(None, map(_find_fault, self._files)), "")

    def has_changed(self) -> bool:
        """Return whether any file was written or replaced since this object was made; true where the files cannot be listed."""
        return bool(self._unreadable or self._find_removal()) or any(
            read_stamp(path) != stamp for path, stamp in self._stamps.items()
        )

    def _find_removal(self) -> str:
        """Return that the generation is gone, where no file tells: its folders may have been removed while they were listed."""
        if self._files or self.generation == 0 or any(self.repo.glob(f"*/{self.generation}")):
            return ""
        return f"generation {self.generation} is not in {self.repo}: its files were removed"

    def _read_in_turn(self) -> Iterator[str]:
        """Yield a fault, or "" for none, after every HASH_BLOCK_BYTES that are read. Never ends."""
        left = HASH_BLOCK_BYTES
        while True:
            yield ""
            for file in self._files:
                left = yield from _read_in_blocks(file, left)


def is_intact(repo: Path, generation: int) -> bool:
    """Return whether every file of a generation is as it was published."""
    return not ArtifactCheck(repo, generation).read_all()


def choose_generation(repo: Path) -> tuple[int, str]:
    """Return the generation to start with, and what is damaged in the pinned one, "" if nothing is.

    Raises ArtifactError when no generation is intact or the configs do not pin exactly one, ConfigError for a repository that
    cannot be served here.
    """
    check_backends(read_repository(repo, with_challenger=False))  # a damaged one is left out of the start
    pinned = read_pinned_generation(repo)
    damage = ArtifactCheck(repo, pinned).read_all()
    if not damage:
        return pinned, ""
    if generation := find_other_intact(repo, pinned):
        return generation, damage
    raise ArtifactError(
        f"{damage}. No other generation in {repo} is intact. Expected one that is as it was published, so nothing was started "
        f"and nothing stopped. {MEND}, then start again."
    )


def find_other_intact(repo: Path, generation: int) -> int | None:
    """Return an intact generation apart from `generation`; None if there is none. Raises RecommenderError or OSError.

    It is the newest one. A generation that was only ever a challenger is returned only if no other one is intact.
    """
    others, unaccepted = set(list_published_generations(repo)) - {generation}, _find_unaccepted(repo)
    order = sorted(others, key=lambda other: (other not in unaccepted, other), reverse=True)
    return next((other for other in order if is_intact(repo, other)), None)


def _find_unaccepted(repo: Path) -> set[int]:
    """Return the generations that were challengers, and that nobody has chosen since."""
    unaccepted = set(read_challengers(repo))
    with suppress(RecommenderError, OSError, ValueError):  # the record may be damaged, too
        unaccepted |= find_unaccepted(read_acts(repo))
    return unaccepted


def _list_files(folder: Path, digests: Mapping[Path, str]) -> list[PublishedFile]:
    """Return the files of a version folder. digests: of the manifests; without one, a manifest must stay as it is now

    Raises ArtifactError when its manifest cannot be read.
    """
    manifest = folder / MANIFEST_FILE
    if not manifest.is_file():
        return []
    manifest_files = load_manifest(folder)["files"]
    published = {name: fact.get("sha256", "") if isinstance(fact, dict) else "" for name, fact in manifest_files.items()}
    files = [PublishedFile(folder / name, digest) for name, digest in published.items()]
    return [PublishedFile(manifest, digests[manifest] if manifest in digests else compute_sha256(manifest)), *files]


def _find_fault(file: PublishedFile) -> str:
    return next(filter(None, _read_in_blocks(file)), "")


def _read_in_blocks(file: PublishedFile, left: int = HASH_BLOCK_BYTES) -> Generator[str, None, int]:
    """Yield "" after `left` bytes of a file, and again after every HASH_BLOCK_BYTES; at its end the fault, if there is one.

    Returns how many bytes are left of the last block.
    """
    digest = hashlib.sha256()
    try:
        with file.path.open("rb") as content:
            while block := content.read(left):
                digest.update(block)
                left -= len(block)
                if left == 0:
                    left = HASH_BLOCK_BYTES
                    yield ""
    except OSError as error:
        yield f"{file.path} cannot be read: {error.strerror}"
        return left
    if digest.hexdigest() != file.sha256:
        yield f"{file.path} is not the file that was published: its SHA-256 differs from the manifest"
    return left
