"""Small repositories that tests share, built once for the sources as they are and kept under .run/test-repositories.

Parallel workers and later runs find what the first one built. Nobody writes into a shared folder: a test that changes
something copies it first.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

from serving.contract.artifacts import MANIFEST_FILE, compute_sha256, load_manifest, write_manifest
from serving.contract.tensors import ENSEMBLE, LIVE_MODELS, STAGES

PROJECT = Path(__file__).parents[1]
CACHE = PROJECT / ".run" / "test-repositories"
SOURCES = ("serving", "repository", "training", "export", "hps_config", "server")
TEST_SOURCES = (Path(__file__), *(PROJECT / "tests" / "unit" / name for name in ("small_shops.py", "live/shops.py")))
KEPT_DIGESTS = 2
ONE_PROCESS = {"recommend": {"instances": 1}}  # of the fused layout: each takes a second to start
SERVED_DATA = "synthetic:users=150,items=300,events=2500,context=1"
# A student takes as long to teach as everything else together, and each publication answers the recorded requests twice.
SERVED_SETTINGS: dict[str, dict] = {
    "pipeline": {"recorded_requests": 200, "candidates": 128},
    "ranker": {"compression": "none"},
    "training": {"graph": "never"},
    "serving": ONE_PROCESS,
}
FOLLOWED_DATA, FOLLOWED_EVENTS = "synthetic:users=150,items=150,events=4500", 3_000  # of the log; the others are live
FOLLOWED_SETTINGS: dict[str, dict] = {  # as fast as an export can be
    "pipeline": {"recorded_requests": 8, "candidates": 64},
    "ranker": {"compression": "none"},
    "training": {"graph": "never"},
    "serving": ONE_PROCESS,
}
FOLLOWED_TOML = """
name = "followed"
[interactions]
path = "events.csv"
user_id = "user_id"
item_id = "item_id"
timestamp = "timestamp"
[items]
path = "items.csv"
item_id = "item_id"
categorical = ["department"]
continuous = ["price"]
"""


# The imports of an export take seconds: tests that find everything built do without them.
def served_repository() -> Path:
    """Return an export of a shop with context columns (store, device, temperature), large enough to be served under load."""

    def build(folder: Path) -> None:
        from rich.console import Console

        from export.build import build_repository
        from export.settings import Settings
        from tests.unit.small_shops import few_resamples
        from training.dataset import load_dataset

        settings = Settings.model_validate(SERVED_SETTINGS)
        with few_resamples():
            build_repository(load_dataset(SERVED_DATA), folder / "model_repository", settings, Console(quiet=True))

    return shared_folder("served", build) / "model_repository"


def fused_repository() -> Path:
    """Return the models of `served_repository` in the fused layout."""

    def build(folder: Path) -> None:
        from export.relayout import relayout

        relayout(served_repository(), folder / "model_repository", "fused")

    return shared_folder("served-fused", build) / "model_repository"


def small_repository() -> Path:
    """Return an export of twelve users and thirty items, item i at price i, with context columns that are always empty.

    Its bounds of drift are exact.
    """

    def build(folder: Path) -> None:
        from rich.console import Console

        from export.build import build_repository
        from export.settings import Settings
        from tests.unit.small_shops import CONTEXT, PRICE, SETTINGS, shop

        dataset = shop(folder / "data", users=12, items=30, events=60, more=PRICE + CONTEXT)
        build_repository(dataset, folder / "repository", Settings.model_validate(SETTINGS), Console(quiet=True))

    return shared_folder("small", build) / "repository"


def lean_repository() -> Path:
    """Return `small_repository` as `remove_code` leaves it: a sixth of the files, for tests that start no tritonserver."""

    def build(folder: Path) -> None:
        remove_code(Path(shutil.copytree(small_repository(), folder / "repository")))

    return shared_folder("small-lean", build) / "repository"


def small_fused_repository() -> Path:
    """Return the models of `small_repository` in one process, which starts in a third of the time of the four."""

    def build(folder: Path) -> None:
        from export.relayout import relayout
        from repository.registry import read_manifest

        source = copy_small_repository(folder / "source")
        facts = {name: fact for name, fact in read_manifest(source, 1).items() if name not in ("schema", "files")}
        facts["settings"]["serving"] = ONE_PROCESS
        write_manifest(source / ENSEMBLE / "1", **facts)
        relayout(source, folder / "repository", "fused")
        shutil.rmtree(source)

    return shared_folder("small-fused", build) / "repository"


def followed_shop() -> Path:
    """Return a folder with a data set (data), an export of it (repository), and what users did afterwards (later.csv)."""

    def build(folder: Path) -> None:
        from tests.unit.small_shops import export
        from training.dataset import load_dataset

        generated, data = load_dataset(FOLLOWED_DATA), folder / "data"
        log = generated.interactions[["user_id", "item_id", "timestamp"]]
        data.mkdir()
        log[:FOLLOWED_EVENTS].to_csv(data / "events.csv", index=False)
        log[FOLLOWED_EVENTS:].to_csv(folder / "later.csv", index=False)
        generated.items[["item_id", "department", "price"]].to_csv(data / "items.csv", index=False)
        (data / "dataset.toml").write_text(FOLLOWED_TOML)
        export(folder, load_dataset(data), "fused", **FOLLOWED_SETTINGS)

    return shared_folder("followed", build)


def copy_small_fused_repository(folder: Path) -> Path:
    """Return a copy of `small_fused_repository` in `folder`, which its user may change."""
    return shutil.copytree(small_fused_repository(), folder)


def copy_small_repository(folder: Path) -> Path:
    """Return a copy of `small_repository` in `folder` as `copy_to_change` makes it."""
    return copy_to_change(small_repository(), folder)


def copy_lean_repository(folder: Path) -> Path:
    """Return a copy of `lean_repository` in `folder`, which its user may change."""
    return Path(shutil.copytree(lean_repository(), folder, copy_function=shutil.copyfile))


def remove_code(repository: Path) -> None:
    """Remove the code that the models of generation 1 carry, and leave it out of their manifests."""
    for model in (*STAGES, *LIVE_MODELS, ENSEMBLE):
        folder = repository / model / "1"
        shutil.rmtree(folder / "serving")
        facts = {name: fact for name, fact in load_manifest(folder).items() if name not in ("schema", "files")}
        if model == ENSEMBLE:
            facts["stages"] = {name: compute_sha256(repository / name / "1" / MANIFEST_FILE) for name in facts["stages"]}
        write_manifest(folder, **facts)


def copy_generation(repo: Path) -> None:
    """Copy generation 1 as generation 2, with the manifests of 1."""
    for model in (*STAGES, *LIVE_MODELS, ENSEMBLE):
        copy_to_change(repo / model / "1", repo / model / "2")


def small_merlin_repository(triton: str) -> Path:
    """Return the models of `small_repository`, published for NVIDIA's containers of one Triton."""

    def build(folder: Path) -> None:
        from export.nvidia.publish import publish_merlin
        from export.nvidia.source import Source
        from export.settings import Settings

        source = Source.open({name: small_repository() / name / "1" for name in (*STAGES, ENSEMBLE)})
        publish_merlin(source, folder / "repository", Settings.model_validate({"merlin": {"triton": triton}}))

    return shared_folder(f"small-merlin-{triton}", build) / "repository"


def copy_to_change(repository: Path, target: Path) -> Path:
    """Copy a repository; the copy's Python files are links, because there are hundreds: remove one before you write it anew."""

    def link_code(source: str, copied: str) -> None:
        if not source.endswith(".py"):
            shutil.copy2(source, copied)
            return
        try:
            os.link(source, copied)
        except OSError:  # another file system
            shutil.copy2(source, copied)

    return Path(shutil.copytree(repository, target, copy_function=link_code))


def restore_copy(copy: Path, repository: Path) -> None:
    """Make a changed copy equal to its repository again: a tenth of the work of another copy."""
    wanted, found = describe_entries(repository), describe_entries(copy)
    for name in sorted(name for name in found if found[name] != wanted.get(name, ...)):
        path = copy / name
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)  # missing: its folder has gone already
    for name in sorted(name for name in wanted if wanted[name] != found.get(name, ...)):
        path = copy / name
        path.mkdir() if wanted[name] is None else shutil.copy2(repository / name, path)


def describe_entries(folder: Path) -> dict[str, tuple[int, int] | None]:
    """Return size and time (ns) of each file below a folder, None of each folder, by relative path."""
    entries: dict[str, tuple[int, int] | None] = {}
    for parent, folders, files in os.walk(folder):
        inside = os.path.relpath(parent, folder)
        entries |= dict.fromkeys(os.path.join(inside, name) for name in folders)
        for name in files:
            status = os.lstat(os.path.join(parent, name))
            entries[os.path.join(inside, name)] = status.st_size, status.st_mtime_ns
    return entries


def shared_folder(name: str, build: Callable[[Path], object], cache_folder: Path = CACHE) -> Path:
    """Return a folder that `build(folder)` filled for the sources as they are now; build it unless some process has."""
    folder = cache_folder / sources_digest() / name
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(folder.parent / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = folder.parent / f"{name}.done"
        if not done.exists():
            shutil.rmtree(folder, ignore_errors=True)  # of a build that was interrupted
            remove_oldest(cache_folder)
            folder.mkdir()
            build(folder)
            done.touch()
    return folder


def remove_oldest(cache_folder: Path) -> None:
    """Keep the folders of the sources as they are now and as they were before."""
    folders = sorted(cache_folder.iterdir(), key=lambda path: path.stat().st_mtime_ns)
    for folder in folders[:-KEPT_DIGESTS]:
        shutil.rmtree(folder, ignore_errors=True)


@cache
def sources_digest() -> str:
    """Return a digest of all that changes what an export writes: files, Python, and threads, which change the order of sums."""
    digest = hashlib.sha256(f"{sys.version}\0{os.environ.get('OMP_NUM_THREADS')}".encode())
    for path in sorted(source_files()):
        digest.update(f"{path.relative_to(PROJECT)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def source_files() -> Iterator[Path]:
    yield from TEST_SOURCES
    yield from (PROJECT / "requirements").glob("*.txt")
    for name in SOURCES:
        for pattern in ("*.py", "*.toml"):
            yield from (PROJECT / name).rglob(pattern)
