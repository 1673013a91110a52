"""Show answers on a terminal, and describe them for JSON."""

from __future__ import annotations

from itertools import zip_longest

from rich.console import Console
from rich.table import Table

from triton_recommender.catalogue import Catalogue
from triton_recommender.models import Health, Recommendations
from triton_recommender.terminal import escape_text

out = Console()
err = Console(stderr=True, highlight=False)


def list_fallbacks(answer: Recommendations | Health) -> list[str]:
    return [str(flag.name).lower() for flag in answer.degraded]


def describe_answer(user_id: str | None, answer: Recommendations, names: Catalogue | None) -> dict:
    """Return an answer as a dict for JSON, with the items' names and titles. user_id: as the caller wrote it"""
    items = [
        {"rank": rank, "item_id": item_id, **describe_item(item_id, names), "score": score}
        for rank, (item_id, score) in enumerate(answer, start=1)
    ]
    return {
        "user_id": parse_user_id(user_id),
        "generation": answer.generation,
        "degraded": list_fallbacks(answer),
        "request_id": answer.request_id,
        **({"stage_ms": {stage: round(ms, 3) for stage, ms in answer.stage_ms.items()}} if answer.stage_ms else {}),
        "items": items,
    }


def parse_user_id(user_id: str | None) -> int | str | None:
    """Return an int for a whole number in its usual spelling, such as "17850"; "007", "--5" and "anna" stay text."""
    try:
        return int(user_id) if user_id is not None and str(int(user_id)) == user_id else user_id
    except ValueError:
        return user_id


def describe_item(item_id: int, names: Catalogue | None) -> dict[str, str]:
    """Return the published name and title of an item, without those that it lacks."""
    title, name = (names.title(item_id), names.item_name(item_id)) if names else (None, None)
    return ({"name": name} if name is not None else {}) | ({"title": title} if title is not None else {})


def print_answer(user_id: str | None, answer: Recommendations, names: Catalogue | None, source: str) -> None:
    visitor = f"user {escape_text(user_id)}" if user_id is not None else "an anonymous visitor"
    out.print(f"Recommendations for {visitor} (generation {answer.generation})", markup=False)
    table = Table()
    table.add_column("#", justify="right")
    table.add_column("item id", justify="right", no_wrap=True)
    if names:
        table.add_column("title", overflow="fold")
    table.add_column("score", justify="right")
    for rank, (item_id, score) in enumerate(answer, start=1):
        described = {name: escape_text(text) for name, text in describe_item(item_id, names).items()}
        title = [described.get("title", "")] if names else []
        table.add_row(str(rank), described.get("name", str(item_id)), *title, f"{score:.3f}")
    out.print(table, markup=False)
    if answer.stage_ms:
        stages = ", ".join(f"{stage} {spent_ms:.2f} ms" for stage, spent_ms in answer.stage_ms.items())
        out.print(f"Stages of the server: {stages}", markup=False, soft_wrap=True)
    if answer.degraded:
        err.print(f"note: answered by the fallback of {', '.join(list_fallbacks(answer))}.", markup=False, soft_wrap=True)
    if not names:
        note = f"note: no titles, as {source} lacks generation {answer.generation}. Name the repository with --repo."
        err.print(escape_text(note), markup=False, soft_wrap=True)


def compare_lists(before: Recommendations, changed: Recommendations, names: Catalogue) -> Table:
    """Return a table of two lists, rank by rank."""
    table = Table()
    table.add_column("#", justify="right")
    for title in ("before", "after"):
        table.add_column(title, overflow="fold")
    for place, pair in enumerate(zip_longest(before.item_ids, changed.item_ids), start=1):
        described = ({} if item_id is None else describe_item(item_id, names) for item_id in pair)
        titles = [escape_text(one.get("title", one.get("name", ""))) for one in described]
        ids = ["" if item_id is None else str(item_id) for item_id in pair]
        table.add_row(str(place), *(text or item_id for text, item_id in zip(titles, ids, strict=True)))
    return table


def warn_of_foreign_items(answer: Recommendations, names: Catalogue, source: str, url: str) -> None:
    """Warn if the catalogue lacks most items of the answer: it may belong to another shop, whose names stand for other ids.

    An older server does not mark items that were added since the export, but its lists show few of them.
    """
    foreign = names.find_foreign_items(answer)
    if 2 * len(foreign) > len(answer):
        err.print(
            f"warning: {len(foreign)} of the {len(answer)} items, such as {foreign[0]}, are not in the catalogue of "
            f"{source}: the server at {url} serves another repository; users and items given by name were not understood. "
            "Name the server's own repository with --repo.",
            markup=False,
            soft_wrap=True,
        )


def describe_health(endpoint: Health) -> str:
    if not endpoint.ready:
        return f"{endpoint.url} is not ready: {escape_text(endpoint.reason)}"
    fallbacks = f", by the fallback of {', '.join(list_fallbacks(endpoint))}" if endpoint.degraded else ""
    return f"{endpoint.url} is ready: generation {endpoint.generation} answered{fallbacks}"
