"""Apply live updates of the tables on this machine until SIGTERM or SIGINT: `python -m serving.tables <levels.json>`."""

from __future__ import annotations

import argparse
import logging
from pathlib import Path

from serving.contract.errors import ConfigError, run_program
from serving.contract.logs import configure_logging
from serving.contract.signals import stop_on_signals
from serving.tables.config import read_config
from serving.tables.updates.updater import Updater


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m serving.tables", description=__doc__)
    parser.add_argument("config", type=Path, help="levels.json of a rank model's version folder")
    parser.add_argument("--tag", help="tag of the server that this process belongs to; only its command line is used")
    config = read_config(parser.parse_args().config)
    if config.updates is None:
        remedy = "Set brokers in [tables] of the export's settings, and export again."
        raise ConfigError(f"model {config.model} names no update source. Expected `updates` with brokers. {remedy}")
    configure_logging(logging.INFO)
    stop = stop_on_signals()
    updater = Updater(config)
    try:
        updater.run(stop)
    finally:
        updater.close()


if __name__ == "__main__":
    run_program(main)
