"""`python -m clients`: one call from the command line, for people or, with --json, for programs.

Exit status: 0 answered, 1 no answer (not ready, too late, overloaded, failed), 2 the call was wrong.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from clients.cache.commands import follow, forget, warm
from clients.catalogue import Catalogue, known_users
from clients.errors import ClientError, InvalidRequest
from clients.models import Health, Query, Recommendations, Timeout
from clients.recommender import DEFAULT_URL, Recommender
from serving.contract.errors import RecommenderError

app = typer.Typer(help="Ask a served repository for recommendations.", no_args_is_help=True, add_completion=False)
out = Console()
err = Console(stderr=True, highlight=False)

N_USERS = 3  # that `users` names

Url = Annotated[str, typer.Option("--url", help="host:port of the server's gRPC endpoint")]
AsJson = Annotated[bool, typer.Option("--json", help="one JSON object on stdout instead of a table")]
Seconds = Annotated[float, typer.Option("--timeout", help="seconds for the whole call, retries included")]


@app.command()
def recommend(
    user_id: Annotated[
        str | None, typer.Option(help="the shop's id of the user; leave it out for an anonymous visitor")
    ] = None,
    k: Annotated[int | None, typer.Option("-k", help="how many items at most; all the server returns by default")] = None,
    history: Annotated[
        str | None, typer.Option(help="item ids, newest first, comma-separated, instead of the stored ones")
    ] = None,
    exclude: Annotated[str, typer.Option(help="item ids that must not come back, comma-separated")] = "",
    context: Annotated[list[str] | None, typer.Option(help="a context column, such as store=3; may be repeated")] = None,
    priority: Annotated[int, typer.Option(help="1 is served first; 0 leaves it to the server")] = 0,
    timeout: Seconds = 5.0,
    repo: Annotated[Path, typer.Option(help="the repository the server serves, for titles and names")] = Path(
        "model_repository"
    ),
    url: Url = DEFAULT_URL,
    as_json: AsJson = False,
) -> None:
    """Recommend items to one user."""
    with _friendly():
        query = Query(user_id, None if history is None else _ids(history), _ids(exclude), columns_of(context or []))
        names = Catalogue.load(repo) or Catalogue()
        with Recommender(url, timeout=Timeout(timeout), priority=priority, catalogue=names) as shop:
            answer = shop.recommend_many([query], k=k)[0]
        if names.generation != answer.generation:  # the titles are those of the generation that answered
            names = Catalogue.load(repo, answer.generation)
        _warn_of_another_shop(answer, names, repo, url)
        if as_json:
            typer.echo(json.dumps(_as_dict(user_id, answer, names), ensure_ascii=False))
        else:
            _print(user_id, answer, names, repo)


@app.command()
def health(url: Url = DEFAULT_URL, timeout: Seconds = 5.0, as_json: AsJson = False) -> None:
    """Say whether the server answers one real question, and which models it serves. Exit status 1 unless it does."""
    with _friendly():
        with Recommender(url, timeout=Timeout(timeout, connect=timeout)) as shop:
            state = shop.health()
            failure = find_failure(shop) if state.ready else "a model is not ready"
        if as_json:
            models = [vars(model) for model in state.models]
            typer.echo(json.dumps({"url": url, "ready": not failure, "failure": failure, "models": models}))
        else:
            _print_health(url, state, failure)
    if failure:
        raise typer.Exit(1)


@app.command()
def users(repo: Annotated[Path, typer.Option(help="the repository that knows them")] = Path("model_repository")) -> None:
    """Name some users to ask for: the most active one, one in the middle and the least active one."""
    with _friendly():
        typer.echo("\n".join(known_users(repo, N_USERS)))


def find_failure(shop: Recommender) -> str:
    """Ask for an anonymous visitor's recommendations; return why there was no answer, "" when there was one."""
    try:
        shop.recommend(None, k=1)
    except ClientError as error:
        return str(error)
    return ""


@contextmanager
def _friendly() -> Iterator[None]:
    """Turns what goes wrong into a message on stderr and an exit status."""
    try:
        yield
    except RecommenderError as error:
        err.print(f"error: {error}", markup=False, soft_wrap=True)
        raise typer.Exit(2 if error.status == InvalidRequest.status else 1) from error


for command in (forget, follow, warm):
    app.command()(_friendly()(command))


def _ids(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def columns_of(pairs: list[str]) -> dict[str, str]:
    for pair in pairs:
        if not pair.partition("=")[0] or "=" not in pair:
            raise InvalidRequest(f"--context is {pair!r}; expected a column and its value, such as store=3.")
    return dict(pair.split("=", 1) for pair in pairs)


def _as_dict(user_id: str | None, answer: Recommendations, catalogue: Catalogue | None) -> dict:
    items = [
        {"rank": rank, "item_id": item_id, **_described(item_id, catalogue), "score": score}
        for rank, (item_id, score) in enumerate(answer, start=1)
    ]
    degraded = [flag.name.lower() for flag in answer.degraded]
    return {"user_id": _number_or_text(user_id), "generation": answer.generation, "degraded": degraded, "items": items}


def _number_or_text(user_id: str | None) -> int | str | None:
    """17850 for "17850"; "007", "--5" and "anna" stay text."""
    try:
        return int(user_id) if user_id is not None and str(int(user_id)) == user_id else user_id
    except ValueError:
        return user_id


def _described(item_id: int, catalogue: Catalogue | None) -> dict[str, str]:
    """Title and name, as far as the repository publishes them."""
    title, name = (catalogue.title(item_id), catalogue.item_name(item_id)) if catalogue else (None, None)
    return ({"name": name} if name is not None else {}) | ({"title": title} if title is not None else {})


def _print(user_id: str | None, answer: Recommendations, catalogue: Catalogue | None, repo: Path) -> None:
    who = f"user {user_id}" if user_id is not None else "an anonymous visitor"
    out.print(f"Recommendations for {who} (generation {answer.generation})", markup=False)
    table = Table()
    table.add_column("#", justify="right")
    table.add_column("item id", justify="right", no_wrap=True)
    if catalogue:
        table.add_column("title", overflow="fold")
    table.add_column("score", justify="right")
    for rank, (item_id, score) in enumerate(answer, start=1):
        described = _described(item_id, catalogue)
        title = [described.get("title", "")] if catalogue else []
        table.add_row(str(rank), described.get("name", str(item_id)), *title, f"{score:.3f}")
    out.print(table, markup=False)
    if answer.degraded:
        err.print(f"note: answered by the fallback of {', '.join(flag.name.lower() for flag in answer.degraded)}.")
    if not catalogue:
        err.print(f"note: no titles, as {repo} does not hold generation {answer.generation}. Name the repository with --repo.")


def _warn_of_another_shop(answer: Recommendations, catalogue: Catalogue | None, repo: Path, url: str) -> None:
    """Its names would become ids of other users, and its titles those of other items."""
    if catalogue and (strangers := catalogue.strangers(answer.item_ids)):
        err.print(
            f"warning: {len(strangers)} of the {len(answer)} items, such as {strangers[0]}, are not in the catalogue of "
            f"{repo}: the server at {url} serves another repository; users and items given by name were not understood. "
            "Name the server's own repository with --repo.",
            markup=False,
            soft_wrap=True,
        )


def _print_health(url: str, state: Health, failure: str) -> None:
    out.print(f"{url} fails: {failure}" if failure else f"{url} is ready, and answered", markup=False, soft_wrap=True)
    table = Table("model", "version", "state", "reason")
    for model in state.models:
        table.add_row(model.name, model.version, model.state, model.reason)
    out.print(table, markup=False)
