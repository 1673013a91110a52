"""Change the rules of the serving generation without an export: python -m server rules apply | list | revert."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from repository.applied_rules import (
    Version,
    apply_rules,
    find_rule_errors,
    find_rules_folder,
    find_unknown_items,
    list_versions,
    revert_rules,
)
from repository.toml_files import open_toml
from serving.contract.errors import ConfigError
from serving.stages.rules.applied import read_current_version

app = typer.Typer(help="Change the rules of the serving generation without an export.", no_args_is_help=True)

Repo = Annotated[Path, typer.Option(help="model repository")]
DEFAULT = Path("model_repository")


@app.command()
def apply(
    path: Annotated[Path, typer.Argument(help="TOML file: the keys of `rules`, or that section of an export's settings")],
    repo: Repo = DEFAULT,
) -> None:
    """Apply the rules of a file from the next request on. If one of them is wrong, change nothing and end with exit code 1."""
    values = read_rules(path)
    findings = find_rule_errors(repo, values)
    for finding in findings:
        typer.echo(str(finding), err=True)
    if findings:
        raise typer.Exit(1)
    print_applied(apply_rules(repo, values, path.name))
    if unknown := find_unknown_items(repo, values):
        typer.echo(
            f"warning: neither the catalogue nor an upsert has {', '.join(unknown)}. Correct a mistyped id, and apply the "
            "rules again; an item that is added later is blocked or pinned as soon as an upsert adds it",
            err=True,
        )


@app.command("list")
def list_all(repo: Repo = DEFAULT) -> None:
    """List the versions, the current one marked."""
    folder = find_rules_folder(repo)
    current = read_current_version(folder)
    for version in list_versions(folder):
        moment = datetime.fromtimestamp(version.applied_s, UTC).strftime("%Y-%m-%d %H:%M")
        mark = "*" if version.number == current else " "
        rules = ", ".join(name for name, value in version.values.items() if value)
        typer.echo(f"{mark} {version.number}  {moment} UTC  {version.note}: {rules or 'no rules'}")
    if not current:
        typer.echo("no rules were applied: each generation uses those that it was exported with")


@app.command()
def revert(
    version: Annotated[
        int | None, typer.Argument(help="version to apply again (default: the one before the current rules were first applied)")
    ] = None,
    repo: Repo = DEFAULT,
) -> None:
    """Apply an earlier version again. Without a version, each further call goes one step further back."""
    print_applied(revert_rules(repo, version))


def print_applied(version: Version) -> None:
    """Print what is in effect from now on, and which generations keep other rules."""
    rules = ", ".join(name for name, value in version.values.items() if value) or "no rules"
    typer.echo(f"version {version.number} is in effect ({version.note}): {rules}")
    for generation, reason in version.misfits.items():
        typer.echo(
            f"warning: generation {generation} keeps its previous rules, because these do not fit it: {reason}", err=True
        )
    typer.echo(
        "`python -m server rules list` shows all versions; `python -m server rules revert NUMBER` applies an earlier one"
    )


def read_rules(path: Path) -> dict:
    """Return the rules in a TOML file: its section [rules], or without one the whole file. Raises ConfigError.

    An empty file is refused, because it would remove all rules, and may be one that was not written to its end.
    """
    with open_toml(path, "docs/settings.md lists the rules") as document:
        if not document:
            raise ConfigError("The file states no rule. To remove all rules, write the line [rules] alone.")
        section = document.get("rules", document)
        if not isinstance(section, dict):
            raise ConfigError(f"rules is {section!r}; expected a table. Write [rules] above the keys.")
        return section
