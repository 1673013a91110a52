"""Write the lists of many users to a CSV file, for mailings and other work that nobody waits for.

users.txt: an id per line ─▶ calls of CALL_USERS users, one after the other ─▶ lists.csv: a row per item
"""

from __future__ import annotations

import csv
import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from triton_recommender.catalogue import Catalogue
from triton_recommender.display import list_fallbacks
from triton_recommender.errors import InvalidRequest, NoAnswer, ServerFault
from triton_recommender.ids import FIRST_USER_ID
from triton_recommender.models import Query, Recommendations
from triton_recommender.recommender import Recommender
from triton_recommender.wire import validate_id

COLUMNS = ("user_id", "rank", "item_id", "title", "score", "generation", "degraded")
CALL_USERS = 16  # a call of more users would delay the requests of visitors
CALL_TIMEOUT_S = 30.0
PAUSE_S = 5.0  # before a call that was not answered is repeated
PATIENCE_S = 300.0  # how long a call is repeated: a server may be restarting


@dataclass
class Counts:
    """users: with a list; items: rows of all lists; unknown, fallbacks, empty: users who are new to the catalogue, whose list
    comes from a fallback of the server, or who have no items."""

    users: int = 0
    items: int = 0
    unknown: int = 0
    fallbacks: int = 0
    empty: int = 0

    @property
    def text(self) -> str:
        notes = {"unknown, and so new visitors": self.unknown, "with fallback lists": self.fallbacks, "no items": self.empty}
        notes_text = "".join(f", {count:,} {note}" for note, count in notes.items() if count)
        return f"{self.users:,} users, {self.items:,} items{notes_text}"


def read_users(path: Path, names: Catalogue) -> list[str]:
    """Return the ids in a text file, one per line. Raises InvalidRequest for a file or a line that names no user."""
    try:
        lines = path.read_text("utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(
            f"{path} cannot be read: {error}. Expected a text file in UTF-8 with a user's id per line."
        ) from error
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                validate_id(names.user_id(line), "user_id", FIRST_USER_ID)
            except InvalidRequest as error:
                raise InvalidRequest(f"Line {number} of {path}: {error} If it is a heading, remove it.") from error
    users = [line.strip() for line in lines if line.strip()]
    if not users:
        raise InvalidRequest(f"{path} names no user; expected an id per line.")
    return users


def write_lists(
    shop: Recommender,
    queries: list[Query],
    path: Path,
    k: int | None = None,
    follow: Callable[[list[list[Query]]], Iterable[list[Query]]] = iter,
) -> Counts:
    """Ask for the lists of all queries and write them to a CSV file with COLUMNS, which appears once it is complete.

    After each call it pauses as long as the call took, so that visitors are answered meanwhile. Raises RecommenderError, and
    writes no file, if no server answers at the start, or for PATIENCE_S later.

    follow: wraps the list of calls, to show progress
    """
    parts = [queries[start : start + CALL_USERS] for start in range(0, len(queries), CALL_USERS)]
    counts = Counts()
    with open_unfinished(path) as file:
        shop.signature()  # an address where nobody answers is an error at once
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        for part in follow(parts):
            for query, answer in zip(part, ask_patiently(shop, part, k), strict=True):
                writer.writerows(list_rows(query, answer))
                count_answer(counts, answer)
    return counts


@contextmanager
def open_unfinished(path: Path) -> Iterator[TextIO]:
    """Open a file that takes the place of `path` after a block without errors. Raises InvalidRequest if it cannot."""
    try:
        if path.exists() and not path.is_file():  # noticed here, and not once everything was asked
            raise InvalidRequest(f"{path} is not a file; expected the name of a file to write.")
        # A name of its own: a run that begins before the last one has ended would write into the same file.
        unfinished = path.with_name(f".{path.name}.{secrets.token_hex(4)}.unfinished")
        try:
            with unfinished.open("w", newline="", encoding="utf-8") as file:
                yield file
            unfinished.replace(path)
        finally:
            unfinished.unlink(missing_ok=True)
    except OSError as error:
        raise InvalidRequest(
            f"{path} cannot be written: {error}. Expected a file name in a folder with room for it."
        ) from error


def ask_patiently(shop: Recommender, queries: list[Query], k: int | None) -> list[Recommendations]:
    """Return one answer per query, also if the servers are overloaded or restart meanwhile. Raises RecommenderError.

    Then rest as long as the answered call took.
    """
    give_up_s = time.monotonic() + PATIENCE_S
    while True:
        began_s = time.monotonic()
        try:
            answers = shop.recommend_many(queries, k=k)
        except (NoAnswer, ServerFault):
            if time.monotonic() + PAUSE_S > give_up_s:
                raise
            time.sleep(PAUSE_S)
        else:
            time.sleep(time.monotonic() - began_s)
            return answers


def list_rows(query: Query, answer: Recommendations) -> Iterator[tuple]:
    """Yield the values of COLUMNS for each item."""
    degraded = " ".join(list_fallbacks(answer))
    for item in answer.items:
        name = item.item_id if item.name is None else item.name
        yield query.user_id, item.rank, name, item.title or "", item.score, answer.generation, degraded


def count_answer(counts: Counts, answer: Recommendations) -> None:
    counts.users += 1
    counts.items += len(answer)
    counts.unknown += any(notice.field == "user_id" for notice in answer.warnings)
    counts.fallbacks += bool(answer.degraded)
    counts.empty += not len(answer)
