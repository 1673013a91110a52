"""Generate docs/settings.md from the settings classes: their docstrings, and the comments of their keys."""

from __future__ import annotations

import ast
import inspect
import io
import json
import textwrap
import tokenize
from typing import Any

from pydantic import BaseModel, TypeAdapter

from export.settings import Settings
from hps_config.description import UNITS, parse_bytes
from repository.triton.code import PROJECT
from repository.triton.config import Serving
from serving.stages.rules.config import RulesConfig

DOCUMENT = PROJECT / "docs" / "settings.md"
CLASSES = {"serving": Serving, "rules": RulesConfig}  # sections that `Settings` holds as plain tables
HEAD = """# Settings of an export

Written by `make docs` from the settings classes. `make export CONFIG=export.toml` reads them from a TOML file. Every key has
the default given here, and an unknown key is refused. The manifest of each generation holds the settings it was exported with.
"""
SERVING_TAIL = """
A section for one model, such as `[serving.rank]`, has the same keys and overrides `[serving]` for it.
"""


def compose_settings_doc() -> str:
    """Return the whole document."""
    sections = {name: CLASSES.get(name) or field.annotation for name, field in Settings.model_fields.items()}
    return "\n".join([HEAD, *(write_section(name, cls) for name, cls in sections.items() if isinstance(cls, type))])


def write_section(name: str, cls: type) -> str:
    """Return one section: its description, and a table of its keys."""
    schema = TypeAdapter(cls).json_schema()
    comments = read_comments(cls)
    rows = [
        f"| `{key}` | {value} | {default} | {comments[key]} |"
        for key, entry in schema["properties"].items()
        for value, default in [
            format_bytes_key(entry) if takes_bytes(cls, key) else (name_kind(entry, schema), format_default(entry))
        ]
    ]
    table = "\n".join(["| key | value | default | |", "|---|---|---|---|", *rows])
    return f"## [{name}]\n{inspect.getdoc(cls)}\n\n{table}\n{SERVING_TAIL if cls is Serving else ''}"


def read_comments(cls: type) -> dict[str, str]:
    """Return the comment of each field of a class. `write_section` raises KeyError where one has none."""
    source = textwrap.dedent(inspect.getsource(cls))
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    by_line = {token.start[0]: token.string.lstrip("# ") for token in tokens if token.type == tokenize.COMMENT}
    fields = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.AnnAssign)]
    lines = {ast.unparse(node.target): range(node.lineno, (node.end_lineno or node.lineno) + 1) for node in fields}
    return {name: by_line[line] for name, field_lines in lines.items() for line in field_lines if line in by_line}


def name_kind(entry: dict[str, Any], schema: dict[str, Any]) -> str:
    """Return the allowed values of a key in words, from its JSON schema."""
    if "$ref" in entry:
        parts = schema["$defs"][entry["$ref"].rsplit("/", 1)[-1]]["properties"]
        return f"`{{ {', '.join(parts)} }}`"
    if "anyOf" in entry:
        kinds = [name_kind(option, schema) for option in entry["anyOf"] if option.get("type") != "null"]
        return " or ".join(dict.fromkeys(kinds))
    if "enum" in entry:
        return ", ".join(f"`{json.dumps(value)}`" for value in entry["enum"])
    if entry["type"] == "array":
        return f"list of {name_kind(entry['items'], schema)}"
    if entry["type"] == "object":
        return f"table of {name_kind(entry['additionalProperties'], schema)}"
    word = {"integer": "whole number", "number": "number", "boolean": "`true`, `false`", "string": "text"}[entry["type"]]
    if entry["type"] == "integer" and "exclusiveMinimum" in entry:
        entry = {**entry, "minimum": entry["exclusiveMinimum"] + 1}
        del entry["exclusiveMinimum"]
    limits = {"minimum": "from {}", "exclusiveMinimum": "above {}", "maximum": "to {}", "exclusiveMaximum": "below {}"}
    return " ".join([word, *(text.format(entry[name]) for name, text in limits.items() if name in entry)])


def format_default(entry: dict[str, Any]) -> str:
    """Return the default in TOML."""
    return "none" if entry.get("default") is None else f"`{json.dumps(entry['default'])}`"


def takes_bytes(cls: type, key: str) -> bool:
    """Return whether a key is an amount of bytes, which may be written with a unit."""
    metadata = cls.model_fields[key].metadata if issubclass(cls, BaseModel) else ()
    return any(getattr(item, "func", None) is parse_bytes for item in metadata)


def format_bytes_key(entry: dict[str, Any]) -> tuple[str, str]:
    """Return the allowed values of a key that `takes_bytes`, and its default in the largest unit that does not exceed it."""
    unit, size = max((pair for pair in UNITS.items() if entry["default"] >= pair[1]), key=lambda pair: pair[1])
    return "bytes", f'`"{entry["default"] // size} {unit}"`'
