"""Describe a loaded data set:  python -m training.dataset describe online-retail"""

from __future__ import annotations

import sys

import numpy as np
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from serving.contract.errors import DataError
from training.dataset.dataset import Dataset
from training.dataset.load import load_dataset
from training.dataset.split import split_log

app = typer.Typer(add_completion=False, help=__doc__)


@app.callback()
def main() -> None:
    """Look at a data set before exporting it."""


@app.command()
def describe(source: str) -> None:
    """Print counts, density, time span, columns, dropped rows and split sizes of SOURCE (folder, bundled name or
    synthetic:…)."""
    try:
        dataset = load_dataset(source)
    except DataError as error:
        print(error, file=sys.stderr)
        raise typer.Exit(1) from error
    table = Table(title=escape(dataset.description.name), show_header=False)
    for fact, value in collect_facts(dataset).items():
        table.add_row(fact, escape(value))
    Console().print(table)
    Console().print(str(dataset.report), markup=False, highlight=False)


def collect_facts(dataset: Dataset) -> dict[str, str]:
    """Return what `describe` prints, in order."""
    log, items, users, spec = dataset.interactions, dataset.items, dataset.users, dataset.description
    n_users, n_items = log["user_id"].nunique(), log["item_id"].nunique()
    train, test = split_log(log)
    bounds_s = int(log["timestamp"].min()), int(log["timestamp"].max())
    first, last = (str(np.datetime64(s, "s"))[:-3].replace("T", " ") for s in bounds_s)
    per_user = log["user_id"].value_counts()
    pairs = len(log.drop_duplicates(["user_id", "item_id"]))
    return {
        "events": f"{len(log):,} ({log['positive'].mean():.1%} positive), {first} to {last} UTC",
        "users": f"{n_users:,} in the log, {len(users):,} in all",
        "events per user": f"median {per_user.median():.0f}, at most {per_user.max():,}",
        "items": f"{n_items:,} in the log, {len(items):,} in all, {int(items['available'].sum()):,} available",
        "density": f"{pairs / (n_users * n_items):.3%} of user-item pairs; {1 - pairs / len(log):.1%} of events repeat a pair",
        "split": f"{len(train):,} events to train, {len(test):,} to test",
        "item features": ", ".join(spec.items.feature_columns if spec.items else []) or "none",
        "user features": ", ".join(spec.users.feature_columns if spec.users else []) or "none",
        "context": ", ".join(f"{column.name} ({column.kind})" for column in dataset.context_columns) or "none",
        "ids": ", ".join(
            f"{kind}: {'text, mapped to int64' if names is not None else 'integers, kept'}"
            for kind, names in (("users", dataset.user_names), ("items", dataset.item_names))
        ),
    }


if __name__ == "__main__":
    app()
