"""python -m repository list | show | diff | tag | untag | record: list generations, and what was done with them."""

from __future__ import annotations

import json
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from repository.printing import print_table
from repository.registry import diff_generations, find_tags, list_generations, read_acts, read_facts, read_manifest, record_act
from serving.contract.errors import ConfigError, run_program
from serving.contract.generations import read_pinned_generation

app = typer.Typer(help="The generations of a model repository.", no_args_is_help=True, add_completion=False)

Repo = Annotated[Path, typer.Option(help="model repository")]
AsJson = Annotated[bool, typer.Option("--json", help="JSON, for machines")]
Generation = Annotated[int, typer.Argument(help="number of the generation")]
Reason = Annotated[str, typer.Option(help="why, for the record")]
DEFAULT = Path("model_repository")


@app.command("list")
def list_command(
    repo: Repo = DEFAULT,
    removed: Annotated[
        bool, typer.Option("--removed", help="also list generations whose files were removed, as recorded")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """List the generations with their data, quality and tags, and which one a server starts with.

    The quality is the ranker's on validation requests. Items that retrieval missed do not count, so it cannot tell which of two
    generations is better.

    Below: settings that changed from one to the next, drift up to a replacement, how experiments with a challenger ended, where
    a generation came from, and the verdicts of `export follow`.
    """
    entries = [entry for entry in list_generations(repo) if removed or not entry.removed]
    if as_json:
        typer.echo(json.dumps([asdict(entry) for entry in entries]))
        return
    names = ("generation", "published (UTC)", "data", "events", "log", "NDCG@10", "Recall@20", "tags")
    table = Table(*names, box=None, padding=(0, 1, 0, 0))  # fits 80 characters
    for entry in entries:
        number = f"{entry.generation}{' (pinned)' if entry.pinned else ' (removed)' if entry.removed else ''}"
        quality = (f"{entry.quality[name]:.4f}" if name in entry.quality else "" for name in ("ndcg_at_10", "recall_at_20"))
        events, days = entry.log.get("events"), " to ".join(entry.log[end] for end in ("first", "last") if end in entry.log)
        count = "" if events is None else f"{events:,}"
        table.add_row(number, format_time(entry.published_s), entry.dataset, count, days, *quality, ", ".join(entry.tags))
    print_table(table)
    for entry in entries:
        changed = ", ".join(f"{key} = {json.dumps(value)}" for key, value in entry.settings.items())
        facts = [("settings: ", changed), ("replaced: ", entry.drift)]
        facts += [("experiment: ", verdict) for verdict in entry.verdicts] + [("", verdict) for verdict in entry.gate]
        for name, fact in facts:
            if fact:
                typer.echo(f"generation {entry.generation}, {name}{fact}")


@app.command()
def show(generation: Generation, repo: Repo = DEFAULT) -> None:
    """Print a generation as JSON: its manifest without the files, its tags, and what the record says of it (`acts`)."""
    facts, acts = read_facts(repo, generation), read_acts(repo)
    facts["tags"] = find_tags(acts, generation)
    generation_acts = (asdict(act) for act in acts if act.generation == generation)
    facts["acts"] = [{key: value for key, value in act.items() if key != "facts"} for act in generation_acts]
    typer.echo(json.dumps(facts, indent=2))


@app.command()
def diff(
    one: Generation,
    other: Annotated[int, typer.Argument(help="number of the other generation")],
    repo: Repo = DEFAULT,
    as_json: AsJson = False,
) -> None:
    """List what differs between two generations: settings, data, versions and reports."""
    differences = diff_generations(repo, one, other)
    if as_json:
        typer.echo(json.dumps(differences))
        return
    if not differences:
        typer.echo(f"Generations {one} and {other} do not differ.")
        return
    table = Table("key", f"generation {one}", f"generation {other}")
    for key, (first, second) in differences.items():
        table.add_row(key, *(f"{value:.5g}" if isinstance(value, float) else str(value) for value in (first, second)))
    print_table(table)


@app.command()
def tag(generation: Generation, name: str, repo: Repo = DEFAULT, reason: Reason = "") -> None:
    """Give a generation a tag, such as `champion`, which keeps its files. If another generation has the tag, it moves."""
    read_manifest(repo, generation)
    if not name.strip() or not name.isprintable():
        raise ConfigError(f"The tag is {name!r}; expected a name of one printable line, such as champion.")
    record_act(repo, "tagged", generation, name, reason)


@app.command()
def untag(generation: Generation, name: str, repo: Repo = DEFAULT, reason: Reason = "") -> None:
    """Remove a tag of a generation. Without any, a later publication may remove its files."""
    if name not in (tags := find_tags(read_acts(repo), generation)):
        raise ConfigError(f"Generation {generation} has no tag {name!r}; it has {', '.join(tags) or 'none'}.")
    record_act(repo, "untagged", generation, name, reason)


@app.command()
def record(repo: Repo = DEFAULT) -> None:
    """Print what was done with the generations, oldest first."""
    acts = read_acts(repo)
    if not acts:
        read_pinned_generation(repo)  # refuses a folder that is no repository
    for act in acts:
        tag_text = f" {act.tag!r}" if act.tag else ""
        line = f"{act.author}  {act.action}{tag_text}: generation {act.generation}  {act.reason}"
        typer.echo(f"{format_time(act.time_s)} UTC  {line}".rstrip())


def format_time(time_s: int) -> str:
    return datetime.fromtimestamp(time_s, UTC).strftime("%Y-%m-%d %H:%M:%S")


if __name__ == "__main__":
    run_program(app)
