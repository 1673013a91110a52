"""What is wrong with a TOML file that somebody wrote, in one sentence."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pydantic import ValidationError

from serving.contract.errors import ConfigError


@contextmanager
def toml_faults(path: Path, reference: str) -> Iterator[None]:
    """Around reading and checking `path`: every fault becomes a ConfigError naming file, key and where the keys are listed."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}. Expected a TOML file; {reference}.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}. Mend that line.") from error
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    except ValidationError as error:
        fault = error.errors()[0]
        where = ".".join(str(part) for part in fault["loc"])
        raise ConfigError(f"{path}: {where}: {fault['msg']}. {reference[0].upper()}{reference[1:]}.") from error
