"""Models of NVIDIA's two readers of ps.json. The `hps` backend reads the file twice, and a usable file must satisfy both:

    ps.json ─▶ parser A  HPS's library: databases, caches      strict types, unknown enumeration values silently become defaults
            └▶ parser B  the Triton backend: lookup sessions   more keys required, numbers and booleans may be strings

Each `read_as_*` returns the parser's result and findings: where it would stop ("error"), or silently use a value other than the
file's ("warning"). `reader.py` combines the two.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from hps_config.ps_config import (
    CACHED,
    REQUIRED,
    UNKNOWN_TO_B,
    UNREAD,
    ModelParams,
    PersistentDb,
    PsConfig,
    UpdateSource,
    VolatileDb,
)
from repository.checks.finding import Finding, make_finding
from serving.contract.errors import ConfigError

BLOCKS = {"volatile_db": VolatileDb, "persistent_db": PersistentDb, "update_source": UpdateSource}


@dataclass
class Reading:
    """The result of one parser."""

    parser: str
    config: PsConfig
    findings: list[Finding] = field(default_factory=list)

    def add_error(self, where: str, message: str) -> None:
        self.findings.append(make_finding("error", where, message, self.parser))

    def add_warning(self, where: str, message: str) -> None:
        self.findings.append(make_finding("warning", where, message, self.parser))


class _Unreadable(Exception):
    """Raised for a value that a parser cannot convert. Its message is the expectation."""


def load_json(path: Path) -> dict:
    """Read a file as strict JSON (no comments, no NaN, no number beyond float64), as parser A requires. Raises ConfigError."""
    try:
        document = json.loads(path.read_text(), parse_constant=_refuse_constant, parse_float=_parse_float)
    except OSError as error:
        remedy = "Correct the path, or export the repository again."
        raise ConfigError(f"{path} cannot be read ({error.strerror}). Expected a ps.json. {remedy}") from error
    except ValueError as error:
        remedy = "Write it with `python -m hps_config plan CONFIG --write ps.json`."
        raise ConfigError(f"{path} is not JSON: {error}. Expected strict JSON, without comments. {remedy}") from error
    if not isinstance(document, dict):
        raise ConfigError(f"{path} holds a {type(document).__name__}. Expected an object with `models`. Write a ps.json.")
    return document


def _parse_float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is beyond float64")
    return value


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON value")


def read_as_a(document: dict) -> Reading:
    """Read a ps.json as HPS's library does. Never raises: faults are findings."""
    return _read(document, "A")


def read_as_b(document: dict) -> Reading:
    """Read a ps.json as the Triton backend does. Never raises: faults are findings."""
    return _read(document, "B")


def _read(document: dict, parser: str) -> Reading:
    reading = Reading(parser, PsConfig())
    values = _read_fields(reading, PsConfig, document, "", skip=("models", *BLOCKS))
    for name, block in BLOCKS.items():
        if name in document:
            values[name] = _read_block(reading, block, document[name], name)
    models = document.get("models")
    if not isinstance(models, list) or not models:
        reading.add_error("models", "is missing or empty. Expected at least one model. List the models.")
        models = []
    values["models"] = tuple(_read_model(reading, model, f"models[{i}]") for i, model in enumerate(models))
    reading.config = PsConfig(**values)
    return reading


def _read_block(reading: Reading, block: type, value: Any, where: str) -> Any:
    if not isinstance(value, dict):
        reading.add_error(where, f"is {value!r}. Expected an object. Write an object or leave the key out.")
        return block()
    return block(**_read_fields(reading, block, value, f"{where}."))


def _read_model(reading: Reading, value: Any, where: str) -> ModelParams:
    params = _read_block(reading, ModelParams, value, where)
    if isinstance(value, dict) and reading.parser == "A":
        if "embedding_table_names" not in value:
            names = tuple(f"sparse_embedding{i}" for i in range(len(params.sparse_files)))
            params = replace(params, embedding_table_names=names)
        params = replace(params, default_value_for_each_table=_fit_defaults(reading, params, where))
        if value.get("use_static_table") is True:
            params = replace(params, embedding_cache_type="static")
    return params


def _fit_defaults(reading: Reading, params: ModelParams, where: str) -> tuple[float, ...]:
    """Return one default value per table: parser A pads with 0 or truncates."""
    values, n_tables = params.default_value_for_each_table, len(params.embedding_vecsize_per_table)
    if len(values) != n_tables:
        reading.add_warning(
            f"{where}.default_value_for_each_table",
            f"has {len(values)} values for {n_tables} tables; A pads with 0 or cuts. Expected {n_tables}. Write one per table.",
        )
    return (values + (0.0,) * n_tables)[:n_tables]


def _read_fields(reading: Reading, block: type, document: dict, prefix: str, skip: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return the keys of one object, defaults where absent. Report missing and unreadable ones."""
    gpucache = str(document.get("gpucache", True)).lower() not in ("false", "0")
    values = {}
    for schema in fields(block):
        treatment = schema.metadata[reading.parser.lower()]
        if schema.name in skip or treatment == UNREAD:
            continue
        where = f"{prefix}{schema.name}"
        if schema.name not in document:
            if treatment == REQUIRED or (treatment == CACHED and gpucache):
                reading.add_error(where, "is missing. This parser requires it. Write the key.")
            values[schema.name] = _find_default(schema, reading.parser)
            continue
        try:
            values[schema.name] = _convert(reading, schema, document[schema.name], where)
        except _Unreadable as expectation:
            reading.add_error(where, f"is {document[schema.name]!r}. Expected {expectation}. Correct the value.")
            values[schema.name] = _find_default(schema, reading.parser)
    return values


def _find_default(schema: Any, parser: str) -> Any:
    if parser == "B" and "b_absent" in schema.metadata:
        return schema.metadata["b_absent"]
    assert schema.default is not MISSING
    return schema.default


def _convert(reading: Reading, schema: Any, value: Any, where: str) -> Any:
    kind = schema.type.removesuffix(" | None")
    if "names" in schema.metadata:
        return _read_enumeration(reading, schema, value, where)
    convert = {"A": _SCALARS_A, "B": _SCALARS_B}[reading.parser]
    if not kind.startswith("tuple"):
        return _read_scalar(reading, convert[kind], value, where)
    if not isinstance(value, list):
        raise _Unreadable("an array")
    element = kind.removeprefix("tuple[").removesuffix(", ...]")
    return tuple(_read_scalar(reading, convert[element], each, f"{where}[{i}]") for i, each in enumerate(value))


def _read_scalar(reading: Reading, convert: Any, value: Any, where: str) -> Any:
    converted = convert(value)
    if convert is _read_int_a and converted != value:
        reading.add_warning(
            where, f"is {value!r}; A reads an integer, {converted}. Expected an integer. Write {converted} or {converted + 1}."
        )
    return converted


def _read_enumeration(reading: Reading, schema: Any, value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise _Unreadable("a string")
    names = schema.metadata["names"]
    spelled = value if reading.parser == "A" else re.sub("[ -]", "_", value.lower())
    if reading.parser == "B" and not spelled:
        return schema.default
    for canonical, spellings in names.items():
        if spelled in spellings and not (reading.parser == "B" and canonical in UNKNOWN_TO_B):
            return canonical
    known = ", ".join(name for name in names if not (reading.parser == "B" and name in UNKNOWN_TO_B))
    used = schema.default if reading.parser == "A" else schema.metadata.get("b_unknown")
    if used is None:
        raise _Unreadable(f"one of {known}")
    case = " (case matters)" if reading.parser == "A" else ""
    message = f"is {value!r}; {reading.parser} does not know it{case} and uses {used!r}. Expected one of {known}. Correct it."
    reading.add_warning(where, message)
    return used


def _read_bool_a(value: Any) -> bool:
    if not isinstance(value, bool):
        raise _Unreadable("true or false, without quotes")
    return value


def _read_number_a(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _Unreadable("a number, without quotes")
    return value


def _read_int_a(value: Any) -> int:
    return int(_read_number_a(value))


def _read_str(value: Any) -> str:
    if not isinstance(value, str):
        raise _Unreadable("a string")
    return value


def _read_bool_b(value: Any) -> bool:
    if isinstance(value, str):
        return value.lower() == "true" or (value.lower() != "false" and _read_int_b(value) != 0)
    return _read_bool_a(value)


def _read_int_b(value: Any) -> int:
    if isinstance(value, str) and re.fullmatch(r"\s*[+-]?\d+", value):
        return int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise _Unreadable("an integer")
    return value


def _read_float_b(value: Any) -> float:
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            raise _Unreadable("a number") from None
    return float(_read_number_a(value))


_SCALARS_A = {"bool": _read_bool_a, "int": _read_int_a, "float": lambda value: float(_read_number_a(value)), "str": _read_str}
_SCALARS_B = {"bool": _read_bool_b, "int": _read_int_b, "float": _read_float_b, "str": _read_str}
