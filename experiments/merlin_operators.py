"""Operators of the graph that merlin-systems lacks on a CPU: a table in memory, an ONNX network, the best items.

They follow its QueryFaiss: a file named at export is copied beside the pickled graph, and opened when the server loads it.
cloudpickle carries the classes by value (merlin_graph.py), so the server needs nothing of this checkout.
"""

from __future__ import annotations

from pathlib import Path
from shutil import copy2
from typing import Any

import numpy as np
import onnxruntime as ort
from merlin.dag import BaseOperator, ColumnSelector, DataFormats
from merlin.dag.node import Node
from merlin.schema import ColumnSchema, Schema


class _OnArrays(BaseOperator):
    """An operator on a table of arrays, never on a data frame."""

    @property
    def supported_formats(self) -> DataFormats:
        return DataFormats.NUMPY_TENSOR_TABLE


class _WithFile(_OnArrays):
    """An operator that opens a file: `opened` is what `open` made of it, and never pickled."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = str(path)
        self.opened: Any = None

    @staticmethod
    def open(path: Path) -> Any:
        raise NotImplementedError

    def load_artifacts(self, artifact_path: str) -> None:
        """Open the file. artifact_path: the folder that `save_artifacts` copied to; "" before there is one."""
        self.opened = self.open(Path(artifact_path) / Path(self.path).name if artifact_path else Path(self.path))

    def save_artifacts(self, artifact_path: str) -> None:
        copy2(self.path, artifact_path)

    def __getstate__(self) -> dict:
        return {**self.__dict__, "opened": None}


class QueryTable(_WithFile):
    """The rows of the ids it is given. path: .npz with `id` (ascending) and a column per feature, each [n_ids].

    An id that is not in the table takes the first row: the example knows no default, and only known ids are asked here.
    """

    def __init__(self, path: Path, id: str, dtypes: dict[str, str]) -> None:
        super().__init__(path)
        self.id, self.dtypes = id, dtypes

    @staticmethod
    def open(path: Path) -> dict[str, np.ndarray]:
        with np.load(path, allow_pickle=False) as file:
            return dict(file)

    def transform(self, col_selector: ColumnSelector, transformable: Any) -> Any:
        ids = next(iter(transformable.values())).values.reshape(-1)
        table = self.opened
        rows = np.minimum(np.searchsorted(table[self.id], ids), len(table[self.id]) - 1)
        rows[table[self.id][rows] != ids] = 0
        return type(transformable)({name: table[name][rows] for name in self.dtypes})

    def compute_output_schema(self, input_schema, col_selector, prev_output_schema=None) -> Schema:
        return Schema([ColumnSchema(name, dtype=dtype) for name, dtype in self.dtypes.items()])


class Network(_WithFile):
    """An ONNX network on some columns of its input: int64 [N, F] codes, float32 [N, G] numbers -> `output` [N, width]."""

    def __init__(self, path: Path, codes: tuple[str, ...], numbers: tuple[str, ...], output: str, width: int) -> None:
        super().__init__(path)
        self.codes, self.numbers, self.output, self.width = codes, numbers, output, width

    @staticmethod
    def open(path: Path) -> ort.InferenceSession:
        options = ort.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])

    def transform(self, col_selector: ColumnSelector, transformable: Any) -> Any:
        def join(names: tuple[str, ...], dtype: type) -> np.ndarray:
            return np.stack([transformable[name].values.reshape(-1).astype(dtype, copy=False) for name in names], axis=1)

        feeds = {"codes": join(self.codes, np.int64), "numbers": join(self.numbers, np.float32)}
        return type(transformable)({self.output: self.opened.run([self.output], feeds)[0]})

    def compute_output_schema(self, input_schema, col_selector, prev_output_schema=None) -> Schema:
        return Schema([ColumnSchema(self.output, dtype=np.float32, dims=(None, self.width))])


class BestItems(_OnArrays):
    """The `count` ids of its input with the highest scores, best first; equal scores keep their order."""

    def __init__(self, scores: Any, count: int) -> None:
        super().__init__()
        self.scores, self.count = Node.construct_from(scores), count
        self.id_column = self.score_column = None

    @property
    def dependencies(self) -> Node:
        return self.scores

    def compute_input_schema(self, root_schema, parents_schema, deps_schema, selector) -> Schema:
        self.id_column, self.score_column = parents_schema.column_names[0], deps_schema.column_names[0]
        return super().compute_input_schema(root_schema, parents_schema, deps_schema, selector)

    def compute_output_schema(self, input_schema, col_selector, prev_output_schema=None) -> Schema:
        shape = (None, self.count)
        ids, scores = (
            ColumnSchema("item_ids", dtype=np.int64, dims=shape),
            ColumnSchema("scores", dtype=np.float32, dims=shape),
        )
        return Schema([ids, scores])

    def transform(self, col_selector: ColumnSelector, transformable: Any) -> Any:
        ids, scores = (transformable[name].values.reshape(-1) for name in (self.id_column, self.score_column))
        best = np.argsort(-scores, kind="stable")[: self.count]
        return type(transformable)({"item_ids": ids[best].astype(np.int64)[None], "scores": scores[best][None]})
