"""python -m hps_config: plan the embedding tables, write and check ps.json."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated
from zipfile import BadZipFile

import numpy as np
import typer
from rich.console import Console

from hps_config.description import read_description
from hps_config.planning import plan_levels, predict
from hps_config.ps_writer import write_ps_json
from hps_config.reader import check_ps_json
from hps_config.report import print_plan
from hps_config.tables import TableSpec
from repository.checks.finding import count_errors
from serving.contract.errors import ConfigError, run_program

app = typer.Typer(help="Plan the embedding tables, write and check ps.json.", add_completion=False, no_args_is_help=True)


@app.command()
def plan(
    config: Annotated[Path, typer.Argument(help="TOML file of table budgets; hps_config/defaults.toml shows every key")],
    trace: Annotated[
        Path | None, typer.Option(help="keys in order of use: .npy for one table, .npz with one array per table")
    ] = None,
    write: Annotated[Path | None, typer.Option(help="write the ps.json here")] = None,
) -> None:
    """Print bytes per level and process, and predicted hit rates. Refuse budgets that are too small."""
    description = read_description(config)
    planned = plan_levels(description.tables, description.budgets)
    traces = read_traces(trace, description.tables) if trace else {}
    print_plan(planned, predict(planned, traces), Console())
    if write:
        try:
            write_ps_json(write, description, planned)
        except OSError as error:
            raise ConfigError(f"{write} cannot be written: {error.strerror}. Choose another --write.") from error
        typer.echo(f"wrote {write}")


@app.command()
def check(path: Annotated[Path, typer.Argument(help="a ps.json")]) -> None:
    """Report what NVIDIA's two parsers would reject or misread; exit status 1 on errors."""
    findings = check_ps_json(path)
    for finding in findings:
        typer.echo(str(finding))
    errors = count_errors(findings)
    typer.echo(f"{path}: {errors} errors, {len(findings) - errors} warnings")
    raise typer.Exit(1 if errors else 0)


def read_traces(path: Path, tables: tuple[TableSpec, ...]) -> dict[str, np.ndarray]:
    """Return the traces of a file: table name -> int64 [N] keys in order of use. Raises ConfigError."""
    try:
        loaded = np.load(path, allow_pickle=False)
        if not isinstance(loaded, np.ndarray):
            with loaded:
                return dict(loaded)
    except (OSError, ValueError, EOFError, BadZipFile) as error:
        raise ConfigError(
            f"{path} cannot be read as a key trace: {error}. Expected .npy or .npz. Write it with np.save or np.savez."
        ) from error
    if len(tables) != 1:
        raise ConfigError(
            f"{path} holds one array for {len(tables)} tables. Expected an .npz with one array per table. "
            "Save it with np.savez(path, table_name=keys, ...)."
        )
    return {tables[0].name: loaded}


if __name__ == "__main__":
    run_program(app)
