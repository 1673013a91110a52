"""Read the plain files that a repository publishes for clients. This needs no other package of the project.

<repo>/recommend/config.pbtxt                   pins the generation that the server answers with
<repo>/recommend/<generation>/item_ids.npy      int64 [n_items], ascending
<repo>/recommend/<generation>/item_titles.json  n_items titles in that order
<repo>/recommend/<generation>/item_names.json   {name: id}, where the shop's item ids are text
<repo>/recommend/<generation>/user_names.json   {name: id}, where its user ids are text
<preprocess of that generation>/store/          user_ids.npy int64 [U], event_count.npy int64 [U + 1]
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np

from triton_recommender.errors import CatalogueError, CatalogueMissing
from triton_recommender.tensors import RECOMMEND

REMEDY = "Export the repository again (`make export`), or name another folder."
_COMMENT = re.compile(r"#.*")
_PINS = (
    re.compile(r"\bversion_policy\s*:?\s*\{\s*specific\s*:?\s*\{([^}]*)\}"),
    re.compile(r"\bmodel_version\s*:\s*(\d+)"),
)


def read_pinned_generation(repo: Path) -> int:
    """Return the generation that the repository is pinned to. Raises CatalogueError or CatalogueMissing."""
    path = repo / RECOMMEND / "config.pbtxt"
    try:
        text = _COMMENT.sub("", path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise CatalogueMissing(
            f"{path} cannot be read: {error}. Expected the configuration of a published repository. "
            f"Create one with `make export REPO={repo}`."
        ) from error
    pins = {int(number) for pattern in _PINS for pin in pattern.findall(text) for number in re.findall(r"\d+", pin)}
    if len(pins) != 1:
        raise CatalogueError(f"{path} is pinned to versions {sorted(pins)}; expected exactly one. {REMEDY}")
    return pins.pop()


def find_published_folder(repo: Path, generation: int) -> Path:
    """Return the folder with a generation's names and titles. Raises CatalogueMissing if it holds none."""
    folder = repo / RECOMMEND / str(generation)
    if not (folder / "item_ids.npy").is_file():
        raise CatalogueMissing(f"{folder} holds no item_ids.npy; expected names and titles of that generation. {REMEDY}")
    return folder


def read_published_items(folder: Path) -> tuple[list[int], list[str]]:
    """Return the ids and titles of all items, [] if no titles are published. Raises CatalogueError."""
    item_ids = open_array(folder / "item_ids.npy").tolist()
    path = folder / "item_titles.json"
    titles = read_json(path) if path.is_file() else []
    if titles and (not isinstance(titles, list) or len(titles) != len(item_ids)):
        raise CatalogueError(f"{path} does not hold one title for each of {len(item_ids)} items. {REMEDY}")
    return item_ids, titles


def read_names(path: Path) -> dict[str, int]:
    """Return name -> id, {} if no names are published. Raises CatalogueError."""
    if not path.is_file():
        return {}
    names = read_json(path)
    if not isinstance(names, dict) or not all(isinstance(number, int) for number in names.values()):
        raise CatalogueError(f"{path} does not say which id each name has; expected {{name: id}}. {REMEDY}")
    return names


def read_active_users(repo: Path, generation: int) -> np.ndarray:
    """Return the ids of all users, int64 [U], from the most to the least active one.

    Raises CatalogueError when the generation's store of users is missing or broken.
    """
    folders = (
        repo / RECOMMEND / str(generation) / "preprocess",  # fused layout
        repo / "preprocess" / str(generation),
        repo / "preprocess_features" / str(generation),  # merlin profile with NVTabular
    )
    store = next((folder for folder in folders if (folder / "store").is_dir()), folders[1]) / "store"
    user_ids, events = open_array(store / "user_ids.npy"), open_array(store / "event_count.npy")
    if not len(user_ids):
        raise CatalogueError(f"{store} holds no user; expected one or more. {REMEDY}")
    if events.shape != (len(user_ids) + 1,):  # the last row stands for unknown users
        raise CatalogueError(f"{store}/event_count.npy has shape {events.shape}; expected {(len(user_ids) + 1,)}. {REMEDY}")
    return user_ids[np.argsort(-events[:-1], kind="stable")]


def list_users(repo: Path, count: int) -> list[str]:
    """Return at most `count` users, as the shop writes them, evenly spread from the most to the least active one.

    Raises CatalogueError when the repository or its store of users is missing or broken.
    """
    generation = read_pinned_generation(repo)
    user_ids = read_active_users(repo, generation)
    chosen = np.linspace(0, len(user_ids) - 1, min(count, len(user_ids))).astype(np.int64)
    by_name = read_names(repo / RECOMMEND / str(generation) / "user_names.json")
    names = {user_id: name for name, user_id in by_name.items()}
    return [str(names.get(user_id, user_id)) for user_id in user_ids[chosen].tolist()]


def open_array(path: Path) -> np.ndarray:
    """Return the file's array, int64 [n], mapped read-only. Raises CatalogueError."""
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as error:
        raise CatalogueError(f"{path} cannot be opened as an array: {error}. {REMEDY}") from error
    if array.dtype != np.int64 or array.ndim != 1:
        raise CatalogueError(f"{path} holds {array.dtype} {list(array.shape)}; expected int64 [any]. {REMEDY}")
    return array


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CatalogueError(f"{path} cannot be read: {error}. {REMEDY}") from error
