"""Compile a fitted NVTabular workflow to a Plan: walk the graph, read the fitted operators, refuse those without a counterpart.

Every output column is one chain of operators from one raw column. Chains that compile:
    Categorify        HashValues        [FillMissing] [Clip] Bucketize        [FillMissing] [Clip] [LogOp] [Normalize]
each with an optional Rename at its end. Lists go through Categorify only. Anything else is an ExportError that names the
operator and the column.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

from serving.contract.errors import ExportError
from serving.stages.features.encode import (
    FIRST_ROW,
    CategoryColumn,
    IntegerVocabulary,
    NumberColumn,
    Plan,
    StringVocabulary,
    Vocabulary,
)
from training.features.operators import Categories, HashValues
from training.features.quiet_nvtabular import Workflow, ops

Chain = tuple[str, list[Any]]  # raw column, operators in order
NUMBER_ORDER = [ops.FillMissing, ops.Clip, ops.LogOp, ops.Normalize]
STRUCTURE = ("SelectionOp", "ConcatColumns", "SubsetColumns")  # operators that only select columns
REMEDY = (
    "Express it with Categorify, HashValues, Bucketize, FillMissing, Clip, LogOp, Normalize or Rename, "
    "or teach training/features/compile.py."
)


def compile_workflow(workflow: Workflow) -> Plan:
    """Return the fitted workflow as a Plan with its columns in order.

    Raises ExportError for operators without a counterpart.
    """
    categorical: list[CategoryColumn] = []
    continuous: list[NumberColumn] = []
    lists: list[CategoryColumn] = []
    vocabularies = {}
    schema = workflow.output_schema
    for name, (source, chain) in _trace_chains(workflow.output_node).items():
        last = type(chain[-1]) if chain else None
        if last in (ops.Categorify, Categories):
            column, vocabularies[name] = _compile_categories(name, source, chain)
            (lists if schema[name].is_list else categorical).append(column)
        elif schema[name].is_list:
            raise ExportError(f"The list {name!r} cannot be compiled for serving without Categorify. {REMEDY}")
        elif last is HashValues:
            _require_single(name, chain)
            n_buckets = chain[-1].num_buckets[source]
            categorical.append(CategoryColumn(name, source, "hash", n_buckets + FIRST_ROW, buckets=n_buckets))
        elif last is ops.Bucketize:
            categorical.append(_compile_bins(name, source, chain))
        else:
            continuous.append(_compile_number(name, source, chain))
    return Plan(tuple(categorical), tuple(continuous), tuple(lists), vocabularies)


def _trace_chains(node) -> dict[str, Chain]:
    """Return the chain of operators of each output column of a node."""
    operator, kind = node.op, type(node.op).__name__
    incoming = {name: chain for parent in node.parents_with_dependencies for name, chain in _trace_chains(parent).items()}
    if kind == "SelectionOp" and not incoming:
        return {name: (name, []) for name in node.output_schema.column_names}
    if kind in STRUCTURE:
        return {name: incoming[name] for name in node.output_schema.column_names}
    if isinstance(operator, ops.Rename):
        return {new: incoming[old[0]] for new, old in operator.column_mapping(node.selector).items()}
    unknown = [name for name in node.output_schema.column_names if name not in incoming]
    if unknown:
        raise ExportError(f"{kind} makes the new column {unknown[0]!r}, which cannot be compiled for serving. {REMEDY}")
    if renamed := [name for name, (source, _) in incoming.items() if name != source]:
        raise ExportError(f"{kind} after Rename to {renamed[0]!r} cannot be compiled for serving. Rename at the end.")
    return {name: (source, [*chain, operator]) for name, (source, chain) in incoming.items()}


def _compile_categories(name: str, source: str, chain: list[Any]) -> tuple[CategoryColumn, Vocabulary]:
    _require_single(name, chain)
    operator = chain[-1]
    for setting in ("num_buckets", "single_table", "search_sorted", "storage_name", "max_size"):
        if getattr(operator, setting):
            raise ExportError(f"Categorify of {name!r} uses {setting}, which cannot be compiled for serving. Leave it out.")
    table = pd.read_parquet(operator.categories[source])[source]
    rows = np.arange(FIRST_ROW, FIRST_ROW + len(table))
    n_rows = FIRST_ROW + len(table)
    if pd.api.types.is_integer_dtype(table.dtype):
        vocabulary = IntegerVocabulary.of(table.to_numpy(np.int64), rows)
        return CategoryColumn(name, source, "integers", n_rows), vocabulary
    if not all(isinstance(value, str) for value in table):
        raise ExportError(
            f"Categorify of {name!r} holds {table.dtype} values, which cannot be compiled. Give it integers or strings."
        )
    return CategoryColumn(name, source, "strings", n_rows), StringVocabulary(table.tolist(), rows)


def _compile_bins(name: str, source: str, chain: list[Any]) -> CategoryColumn:
    boundaries = tuple(float(boundary) for boundary in chain[-1].boundaries(source))
    number = _compile_number(name, source, chain[:-1])
    if any(isinstance(operator, ops.LogOp | ops.Normalize) for operator in chain[:-1]):
        raise ExportError(
            f"LogOp or Normalize before Bucketize of {name!r} cannot be compiled for serving. Move the boundaries."
        )
    n_rows = FIRST_ROW + len(boundaries) + 1
    fill, low, high = number.fill, number.low, number.high
    return CategoryColumn(name, source, "bins", n_rows, boundaries=boundaries, fill=fill, low=low, high=high)


def _compile_number(name: str, source: str, chain: list[Any]) -> NumberColumn:
    """Return a chain of numeric operators, which must follow NUMBER_ORDER, as the encoding of a column."""
    for operator in chain:
        if type(operator) not in NUMBER_ORDER:
            raise ExportError(f"{type(operator).__name__} of {name!r} cannot be compiled for serving. {REMEDY}")
    order = [NUMBER_ORDER.index(type(operator)) for operator in chain]
    if order != sorted(set(order)):
        names = " >> ".join(type(operator).__name__ for operator in chain)
        raise ExportError(
            f"{names} of {name!r} cannot be compiled: expected the order FillMissing, Clip, LogOp, Normalize, each once."
        )
    column = NumberColumn(name, source)
    for operator in chain:
        if isinstance(operator, ops.FillMissing):
            column = replace(column, fill=float(operator.fill_val))
        elif isinstance(operator, ops.Clip):
            low, high = (None if bound is None else float(bound) for bound in (operator.min_value, operator.max_value))
            column = replace(column, low=low, high=high)
        elif isinstance(operator, ops.LogOp):
            column = replace(column, log=True)
        else:
            std = operator.stds[source]
            column = replace(column, mean=operator.means[source], std=std if std > 0 else 1.0)
    return column


def _require_single(name: str, chain: list[Any]) -> None:
    if len(chain) > 1:
        raise ExportError(
            f"{type(chain[0]).__name__} before {type(chain[-1]).__name__} of {name!r} cannot be compiled for serving. {REMEDY}"
        )
