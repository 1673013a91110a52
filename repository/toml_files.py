"""Read a TOML file; each fault of it is a ConfigError of one sentence."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from serving.contract.errors import ConfigError


@contextmanager
def open_toml(path: Path, reference: str) -> Iterator[dict[str, Any]]:
    """Yield the content of a file. Errors of reading and checking it become a ConfigError that names the file and the key.

    reference: a clause that says where all keys are listed
    """
    try:
        yield tomllib.loads(path.read_text("utf-8-sig"))  # some editors write a byte order mark
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}. Expected a TOML file; {reference}.") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}. Save the file as UTF-8.") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}. Correct that line.") from error
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    except ValidationError as error:
        fault = error.errors()[0]
        message = ": ".join(filter(None, (".".join(map(str, fault["loc"])), describe_fault(fault).rstrip("."))))
        raise ConfigError(f"{path}: {message}; {reference}.") from error


def describe_fault(fault: ErrorDetails) -> str:
    """Return what was expected of a key, and the value if it is at fault; messages of our own name it themselves."""
    message = fault["msg"].removeprefix("Value error, ")
    if fault["type"] in ("value_error", "extra_forbidden", "missing"):
        return message
    return f"{message}, got {fault['input']!r:.60}"


def refuse_unknown_keys(document: Mapping[str, object], model: type[BaseModel], section: str = "") -> None:
    """Raise ConfigError for the first key of a parsed file that `model`, or the class of one of its sections, does not have."""
    for key, value in document.items():
        if key not in model.model_fields:
            raise ConfigError(describe_unknown_key(section, key, model.model_fields.keys()))
        kind = model.model_fields[key].annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel) and isinstance(value, Mapping):
            refuse_unknown_keys(value, kind, f"{section}.{key}" if section else key)


def describe_unknown_key(section: str, key: str, known: Collection[str]) -> str:
    """Return a message about an unknown key: the most similar known key, and all known keys."""
    fact = f"[{section}] has the unknown key {key!r}" if section else f"There is no section or key {key!r}"
    alike = difflib.get_close_matches(key, known, n=1)
    meant = f" Did you mean {alike[0]!r}?" if alike else ""
    return f"{fact}.{meant} Allowed: {', '.join(known)}."
