"""Say in one sentence what is wrong with a request that pydantic refuses: the field, its value, and what was expected."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

UNION_PARTS = {"str", "int", "float"}  # pydantic adds the type that it tried to the place of a fault in a union
EXPECTED = {  # by the type of a fault
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "string_type": "a text",
    "dict_type": "an object",
    "model_type": "an object",
    "list_type": "a list",
    "too_short": "at least one value",
}

PHRASES = {  # pydantic's words -> ours, in messages of faults that EXPECTED does not name
    "Input should be greater": "expected a number greater",
    "Input should be less": "expected a number less",
    "Input should be": "expected",
    "String should have": "expected",
}


def describe_fault(fault: Mapping[str, Any], place: Iterable[object], known: Iterable[str] = ()) -> str:
    """Return a message for one entry of `ValidationError.errors()`.

    place: where the value is, from the outside to the inside; known: the fields that exist, to name them for an unknown field
    """
    parts = list(map(str, place))
    is_union = len(parts) > 1 and parts[-1] in UNION_PARTS
    name = ".".join(parts[:-1] if is_union else parts)
    if fault["type"] == "missing":
        return f"{name} is missing. Add it."
    if fault["type"] == "extra_forbidden":
        return f"There is no field {name!r}. The fields are {', '.join(known)}."
    if fault["type"] == "value_error":
        expected = fault["msg"].removeprefix("Value error, ")
    elif is_union:
        expected = "expected a text or a number"
    elif fault["type"] in EXPECTED:
        expected = f"expected {EXPECTED[fault['type']]}"
    else:
        expected = fault["msg"]
        for phrase, replacement in PHRASES.items():
            expected = expected.replace(phrase, replacement)
    value = "empty" if fault["type"] == "too_short" else f"{fault['input']!r:.60}"
    return f"{name} is {value}; {expected}." if name else f"{expected[0].upper()}{expected[1:]}."
