"""`python -m triton_recommender` (from a checkout `python -m clients`): make one call, and print it as text or JSON.

Exit status: 0 answered, 1 no answer (not ready, too late, overloaded, failed), 2 the call was wrong.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import track

from triton_recommender.bulk import CALL_TIMEOUT_S, read_users, write_lists
from triton_recommender.cache.commands import COMMAND_TIMEOUT_S, CacheUrl, Namespace, TtlS, follow, forget
from triton_recommender.cache.redis_cache import RedisCache
from triton_recommender.catalogue import Catalogue
from triton_recommender.client import DEFAULT_URL
from triton_recommender.display import (
    compare_lists,
    describe_answer,
    describe_health,
    describe_item,
    err,
    list_fallbacks,
    out,
    print_answer,
    warn_of_foreign_items,
)
from triton_recommender.errors import CatalogueMissing, InvalidRequest, RecommenderError, Unavailable
from triton_recommender.folder import list_users, read_active_users, read_pinned_generation
from triton_recommender.models import EventDetails, Query, Timeouts, Tls
from triton_recommender.recommender import Recommender
from triton_recommender.terminal import dump_json, escape_text

app = typer.Typer(help="Ask a served repository for recommendations.", no_args_is_help=True, add_completion=False)

N_USERS = 3  # how many `users` prints
WARMING_TIMEOUT_S = 30.0  # of one call of `warm`, which asks for as many users as the server takes at once

Url = Annotated[
    str, typer.Option("--url", help="host:port of the server's gRPC endpoint, or http://host:port; several: comma-separated")
]
AsJson = Annotated[bool, typer.Option("--json", help="one JSON object on stdout instead of a table")]
Seconds = Annotated[float, typer.Option("--timeout", help="seconds to connect, and again for the call with its retries")]
Source = Annotated[str, typer.Option("--repo", help="names and titles: the repository's folder, or a catalogue's file or URL")]
RootCertificates = Annotated[
    Path | None, typer.Option("--root-certificates", help="PEM file of trusted root certificates (TLS)")
]
ClientCertificate = Annotated[
    Path | None, typer.Option("--client-certificate", help="PEM file of this caller's certificate (mutual TLS)")
]
ClientKey = Annotated[Path | None, typer.Option("--client-key", help="PEM file of that certificate's private key")]
Header = Annotated[list[str] | None, typer.Option("--header", help="name=value, sent with the call; may be repeated")]
Context = Annotated[list[str] | None, typer.Option("--context", help="a context column, such as store=3; may be repeated")]

DEFAULT_SOURCE = "model_repository"


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
    context: Context = None,
    after: Annotated[int | None, typer.Option(help="a sequence that `observe` printed: the answer reflects it")] = None,
    category: Annotated[str | None, typer.Option(help="recommend items of this category only")] = None,
    among: Annotated[str | None, typer.Option(help="item ids to recommend from, comma-separated")] = None,
    priority: Annotated[int, typer.Option(help="1 is served first; 0 leaves it to the server")] = 0,
    strict: Annotated[bool, typer.Option("--strict", help="refuse unknown names instead of warning of them")] = False,
    timings: Annotated[bool, typer.Option("--timings", help="say how long each stage of the server took")] = False,
    timeout: Seconds = 5.0,
    repo: Source = DEFAULT_SOURCE,
    url: Url = DEFAULT_URL,
    root_certificates: RootCertificates = None,
    client_certificate: ClientCertificate = None,
    client_key: ClientKey = None,
    header: Header = None,
    as_json: AsJson = False,
) -> None:
    """Recommend items to one user."""
    with report_errors():
        names = find_catalogue(repo)
        items = None if history is None else split_ids(history)
        columns = parse_pairs(context or [], "--context")
        among_ids = None if among is None else split_ids(among)
        query = Query(user_id, items, split_ids(exclude), columns, after, category=category, among=among_ids)
        settings = {"priority": priority, "catalogue": names or (None if strict else Catalogue()), "strict": strict}
        settings["timings"] = timings
        with connect(url, timeout, (root_certificates, client_certificate, client_key), header, **settings) as shop:
            answer = shop.recommend_many([query], k=k)[0]
        if Path(repo).is_dir() and (names is None or names.generation != answer.generation):
            # titles of the generation that answered, if it has some; a file or a URL has those of one generation
            names = find_catalogue(repo, answer.generation) or names
        if names is not None:
            warn_of_foreign_items(answer, names, repo, url)
        for notice in answer.warnings:
            err.print(f"warning: {escape_text(notice.message)}", markup=False, soft_wrap=True)
        if category and not answer.item_ids:
            warning = f"warning: no item of the category {category!r} can be shown. Check how the data set writes its name."
            err.print(escape_text(warning), markup=False, soft_wrap=True)
        if as_json:
            typer.echo(dump_json(describe_answer(user_id, answer, names)))
        else:
            print_answer(user_id, answer, names, repo)


@app.command()
def recommend_all(
    users: Annotated[Path, typer.Argument(help="text file with a user's id per line")],
    lists: Annotated[Path, typer.Argument(help="CSV file to write: a row per item of each list")],
    k: Annotated[int | None, typer.Option("-k", help="how many items at most; all the server returns by default")] = None,
    context: Context = None,
    category: Annotated[str | None, typer.Option(help="recommend items of this category only")] = None,
    repo: Source = DEFAULT_SOURCE,
    url: Url = DEFAULT_URL,
    root_certificates: RootCertificates = None,
    client_certificate: ClientCertificate = None,
    client_key: ClientKey = None,
    header: Header = None,
) -> None:
    """Write the lists of many users to a file, as a mailing needs them, while visitors are served.

    Once it has begun, it waits up to five minutes for servers that are overloaded or restart. Without an answer by then, it
    writes no file.
    """
    with report_errors():
        names = find_catalogue(repo) or Catalogue()
        columns = parse_pairs(context or [], "--context")
        queries = [Query(user_id, context=columns, category=category) for user_id in read_users(users, names)]
        pem_files = root_certificates, client_certificate, client_key
        with connect(url, CALL_TIMEOUT_S, pem_files, header, catalogue=names) as shop:
            counts = write_lists(shop, queries, lists, k, lambda parts: track(parts, "asking", console=err, transient=True))
        typer.echo(f"{lists}: {counts.text}")


@app.command()
def observe(
    user_id: Annotated[str, typer.Option(help="the shop's id of the user")],
    item_id: Annotated[str, typer.Option(help="the shop's id of the item")],
    event: Annotated[str | None, typer.Option(help="what happened, such as view; the server's default is a positive")] = None,
    timestamp_ms: Annotated[int | None, typer.Option(help="milliseconds since 1970 UTC; now by default")] = None,
    value: Annotated[float | None, typer.Option(help="quantity, rating or amount")] = None,
    event_id: Annotated[str | None, typer.Option(help="idempotency key: the same one again changes nothing")] = None,
    request_id: Annotated[str | None, typer.Option(help="request id of the answer that the event reacts to")] = None,
    context: Context = None,
    timeout: Seconds = 5.0,
    repo: Source = DEFAULT_SOURCE,
    url: Url = DEFAULT_URL,
    root_certificates: RootCertificates = None,
    client_certificate: ClientCertificate = None,
    client_key: ClientKey = None,
    header: Header = None,
    as_json: AsJson = False,
) -> None:
    """Tell the server what a user did; print the event's sequence once it is durable."""
    with report_errors():
        details: EventDetails = {"timestamp_ms": timestamp_ms, "value": value, "event_id": event_id, "request_id": request_id}
        details["context"] = parse_pairs(context or [], "--context")
        names = find_catalogue(repo) or Catalogue()
        with connect(url, timeout, (root_certificates, client_certificate, client_key), header, catalogue=names) as shop:
            sequence = shop.observe(user_id, item_id, event, **details)
        for notice in names.resolve(Query(user_id, among=[item_id]))[1]:
            message = notice.message.removeprefix(f"{notice.field}: ")
            err.print(f"warning: {escape_text(message)}", markup=False, soft_wrap=True)
        typer.echo(dump_json({"sequence": sequence}) if as_json else f"durable as {sequence}")


@app.command()
def buy(
    user_id: Annotated[str, typer.Option(help="the shop's id of the user")],
    k: Annotated[int, typer.Option("-k", help="how many items of each list to show")] = 5,
    timeout: Seconds = 5.0,
    repo: Source = DEFAULT_SOURCE,
    url: Url = DEFAULT_URL,
    root_certificates: RootCertificates = None,
    client_certificate: ClientCertificate = None,
    client_key: ClientKey = None,
    header: Header = None,
) -> None:
    """Post the purchase of the first recommended item, and show the list before and after it, with the time between.

    It is a real event: the user has the item from then on.
    """
    with report_errors():
        names = find_catalogue(repo) or Catalogue()
        with connect(url, timeout, (root_certificates, client_certificate, client_key), header, catalogue=names) as shop:
            before = shop.recommend(user_id, k=k)
            if not before.item_ids:
                raise InvalidRequest(
                    f"The server recommends nothing to user_id {user_id!r}; expected an item to buy. "
                    "Try a user that `python -m clients users` lists."
                )
            started_s = time.perf_counter()
            sequence = shop.observe(user_id, before.item_ids[0])
            durable_s = time.perf_counter()
            changed = shop.recommend(user_id, k=k, after=sequence)
            changed_s = time.perf_counter()
        bought = describe_item(before.item_ids[0], names)
        times_ms = [1e3 * (end_s - begin_s) for begin_s, end_s in ((started_s, durable_s), (started_s, changed_s))]
        out.print(
            f"User {escape_text(user_id)} buys {escape_text(bought.get('title', str(before.item_ids[0])))}: durable after "
            f"{times_ms[0]:.1f} ms, the changed list is there after {times_ms[1]:.1f} ms",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )
        out.print(compare_lists(before, changed, names), markup=False)


@app.command()
def upsert(
    kind: Annotated[str, typer.Argument(help="item or user")],
    record_id: Annotated[str, typer.Argument(metavar="ID", help="the shop's id of the item or user")],
    columns: Annotated[str, typer.Argument(help='JSON of the data set\'s columns, such as {"price": 9.5}')],
    timeout: Seconds = 5.0,
    repo: Source = DEFAULT_SOURCE,
    url: Url = DEFAULT_URL,
    root_certificates: RootCertificates = None,
    client_certificate: ClientCertificate = None,
    client_key: ClientKey = None,
    header: Header = None,
    as_json: AsJson = False,
) -> None:
    """Tell the server that an item or user is new or changed; columns that are left out stay as they are."""
    with report_errors():
        try:
            parsed = json.loads(columns)
        except ValueError as error:
            raise InvalidRequest(f'columns is not JSON: {error}. Expected an object, such as {{"price": 9.5}}.') from error
        names = find_catalogue(repo) or Catalogue()
        with connect(url, timeout, (root_certificates, client_certificate, client_key), header, catalogue=names) as shop:
            sequence = shop.upsert(kind, record_id, parsed)
        typer.echo(dump_json({"sequence": sequence}) if as_json else f"durable as {sequence}")


@app.command()
def health(
    url: Url = DEFAULT_URL,
    timeout: Seconds = 5.0,
    root_certificates: RootCertificates = None,
    client_certificate: ClientCertificate = None,
    client_key: ClientKey = None,
    header: Header = None,
    as_json: AsJson = False,
) -> None:
    """Send every server one real request, and print whether it was answered."""
    with report_errors():
        with connect(url, timeout, (root_certificates, client_certificate, client_key), header) as shop:
            endpoints = shop.health()
        if as_json:
            facts = [vars(endpoint) | {"degraded": list_fallbacks(endpoint)} for endpoint in endpoints]
            typer.echo(dump_json({"ready": any(endpoint.ready for endpoint in endpoints), "endpoints": facts}))
        else:
            for endpoint in endpoints:
                out.print(describe_health(endpoint), markup=False, soft_wrap=True)
    if not any(endpoint.ready for endpoint in endpoints):
        raise typer.Exit(1)


@app.command()
def users(repo: Annotated[Path, typer.Option(help="the repository's folder")] = Path(DEFAULT_SOURCE)) -> None:
    """Print some users to try: the most active one, one in the middle and the least active one."""
    with report_errors():
        for user in list_users(repo, N_USERS):
            typer.echo(escape_text(user))


@app.command()
def catalogue(repo: Source = DEFAULT_SOURCE) -> None:
    """Write names and titles as one JSON document: clients accept its file or URL instead of the repository's folder."""
    with report_errors():
        typer.echo(json.dumps(Catalogue.load(repo).as_document()))


@app.command()
def warm(
    cache: CacheUrl = "redis://localhost:6379",
    namespace: Namespace = "recommend",
    ttl_s: TtlS = 300.0,
    count: Annotated[int, typer.Option("--users", min=1, help="how many users, the most active first")] = 1_000,
    context: Context = None,
    repo: Annotated[Path, typer.Option(help="the folder of the repository that the server serves")] = Path(DEFAULT_SOURCE),
    url: Url = DEFAULT_URL,
) -> None:
    """Request the answers of the most active users, so that they are cached when these users come."""
    with report_errors():
        user_ids = read_active_users(repo, read_pinned_generation(repo))[:count].tolist()
        columns, fallbacks = parse_pairs(context or [], "--context"), 0
        store = RedisCache(cache, ttl_s, namespace=namespace, timeout_s=COMMAND_TIMEOUT_S)
        with connect(url, WARMING_TIMEOUT_S, (None, None, None), None, cache=store) as shop:
            size = shop.signature().max_batch
            for start in range(0, len(user_ids), size):  # each with a timeout of its own
                queries = [Query(user_id, context=columns) for user_id in user_ids[start : start + size]]
                fallbacks += sum(bool(answer.degraded) for answer in shop.recommend_many(queries))
        counts = store.counts
        if counts.failures:
            raise Unavailable(
                f"Redis at {store.address} did not answer, so only {counts.stored} of {len(user_ids)} answers were stored. "
                "Check Redis, then run this command again."
            )
        typer.echo(f"{len(user_ids)} users: {counts.stored} cached now, {counts.hits} before, {fallbacks} got fallbacks")


@contextmanager
def report_errors() -> Iterator[None]:
    """Turn errors into a message on stderr and an exit status."""
    try:
        yield
    except RecommenderError as error:
        err.print(f"error: {escape_text(str(error))}", markup=False, soft_wrap=True)
        raise typer.Exit(2 if error.status == InvalidRequest.status else 1) from error


for command in (forget, follow):  # defined in the cache package, which this module imports
    app.command()(report_errors()(command))


def connect(
    url: str, timeout_s: float, pem_files: tuple[Path | None, Path | None, Path | None], headers: list[str] | None, **settings
) -> Recommender:
    """Return a client for the options that every command has.

    pem_files: root certificates, client certificate and its key; the connection is plain if none is given
    """
    root_certificates, client_certificate, client_key = pem_files
    tls = Tls(root_certificates, client_key, client_certificate) if any(pem_files) else None
    timeouts = Timeouts(timeout_s, connect=timeout_s)
    urls = [part.strip() for part in url.split(",")]
    return Recommender(urls, timeouts=timeouts, tls=tls, headers=parse_pairs(headers or [], "--header"), **settings)


def find_catalogue(source: str, generation: int | None = None) -> Catalogue | None:
    """Return names and titles; None where the source publishes none, or where DEFAULT_SOURCE does not exist.

    Raises CatalogueError for a source that is broken, and for one that the caller named and that does not exist.
    """
    try:
        return Catalogue.load(source, generation)
    except CatalogueMissing:
        if source != DEFAULT_SOURCE and not Path(source).exists():
            raise
        return None


def split_ids(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def parse_pairs(pairs: list[str], option: str) -> dict[str, str]:
    """Return name -> value. Raises InvalidRequest."""
    for pair in pairs:
        if not pair.partition("=")[0] or "=" not in pair:
            raise InvalidRequest(f"{option} is {pair!r}; expected a name and its value, such as store=3.")
    return dict(pair.split("=", 1) for pair in pairs)
