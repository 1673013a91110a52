"""As much of `hugectr` as the training script calls: it records the layers, writes the JSON as HugeCTR's `save_graph_to_json`
does (add_dense_layer.cpp), and in place of training random weights in HugeCTR's file formats. Refuses what it does not know.
"""

from __future__ import annotations

import json
import types
from pathlib import Path
from typing import Any

import numpy as np

from export.nvidia.hugectr.layers import compute_interaction_width


class Recorded:
    def __init__(self, *args, **settings) -> None:
        self.args, self.settings = args, settings

    def __getattr__(self, name: str) -> Any:
        return self.settings[name]


class Input(Recorded):
    pass


class SparseEmbedding(Recorded):
    pass


class DenseLayer(Recorded):
    pass


class Model:
    def __init__(self, solver, reader, optimizer) -> None:
        self.solver, self.reader = solver, reader
        self.layers: list[Recorded] = []

    def add(self, layer) -> None:
        self.layers.append(layer)

    def compile(self) -> None:
        assert Path(self.reader.source[0]).is_file()
        assert Path(self.reader.eval_source).is_file()

    def summary(self) -> None:
        pass

    def graph_to_json(self, graph_config_file: str) -> None:
        Path(graph_config_file).write_text(json.dumps({"layers": [self.described(layer) for layer in self.layers]}))

    def described(self, layer) -> dict:
        if isinstance(layer, Input):
            name, nnz, fixed, slots = layer.data_reader_sparse_param_array[0].args
            sparse = {"top": name, "nnz_per_slot": nnz, "is_fixed_length": fixed, "slot_num": slots}
            return {
                "type": "Data",
                "label": {"top": layer.label_name, "label_dim": layer.label_dim},
                "dense": {"top": layer.dense_name, "dense_dim": layer.dense_dim},
                "sparse": [sparse],
            }
        if isinstance(layer, SparseEmbedding):
            hparam = {
                "workspace_size_per_gpu_in_mb": layer.workspace_size_per_gpu_in_mb,
                "max_vocabulary_size_global": 0,
                "embedding_vec_size": layer.embedding_vec_size,
                "combiner": layer.combiner,
            }
            optimizer = {"update_type": "Global", "type": "Adam", "adam_hparam": {"beta1": 0.9}}
            own = {"type": layer.embedding_type, "bottom": layer.bottom_name, "top": layer.sparse_embedding_name}
            return own | {"sparse_embedding_hparam": hparam, "optimizer": optimizer}
        bottom, top = (names[0] if len(names) == 1 else names for names in (layer.bottom_names, layer.top_names))
        own = {"type": layer.layer_type, "bottom": bottom, "top": top}
        return own | ({"fc_param": {"num_output": layer.num_output}} if layer.layer_type == "InnerProduct" else {})

    def fit(self, max_iter, display, eval_interval, snapshot, snapshot_prefix) -> None:
        assert 0 < snapshot < max_iter
        data, embedding, *dense = self.layers
        slots = data.data_reader_sparse_param_array[0].args[3]
        rng, width, weights = np.random.default_rng(3), data.dense_dim, []
        for layer in dense:
            if layer.layer_type == "Interaction":
                width = compute_interaction_width(embedding.embedding_vec_size, slots)
            elif layer.layer_type == "InnerProduct":
                weights += [rng.normal(size=(width, layer.num_output)) / np.sqrt(width), rng.normal(size=layer.num_output)]
                width = layer.num_output
        np.concatenate([array.ravel() for array in weights]).astype("<f4").tofile(f"{snapshot_prefix}_dense_{snapshot}.model")
        self.write_rows(Path(f"{snapshot_prefix}0_sparse_{snapshot}.model"), embedding.embedding_vec_size, rng)

    def write_rows(self, folder: Path, width: int, rng) -> None:
        """Rows of the keys that were trained on, in no order, as a hash table gives them."""
        import pyarrow.parquet as pq

        part = Path(self.reader.source[0]).parent
        names = [entry["col_name"] for entry in json.loads((part / "_metadata.json").read_text())["cats"]]
        files = (part.parent / line for line in Path(self.reader.source[0]).read_text().split()[1:])
        columns = [column for file in files for column in pq.read_table(file).select(names).columns]
        keys = np.unique(np.concatenate([flat(column) for column in columns]))
        keys = rng.permutation(keys)
        folder.mkdir()
        keys.astype("<i8").tofile(folder / "key")
        rng.normal(size=(len(keys), width)).astype("<f4").tofile(folder / "emb_vector")


def flat(column) -> np.ndarray:
    import pyarrow as pa

    values = column.combine_chunks()
    return (values.flatten() if pa.types.is_list(values.type) else values).to_numpy(zero_copy_only=False)


def names(*values: str) -> types.SimpleNamespace:
    return types.SimpleNamespace(**{value: value for value in values})


def module() -> types.ModuleType:
    fake = types.ModuleType("hugectr")
    vars(fake).update(dict.fromkeys(("CreateSolver", "DataReaderParams", "CreateOptimizer", "DataReaderSparseParam"), Recorded))
    vars(fake).update(
        Input=Input,
        SparseEmbedding=SparseEmbedding,
        DenseLayer=DenseLayer,
        Model=Model,
        DataReaderType_t=names("Parquet"),
        Check_t=names("Non"),
        Optimizer_t=names("Adam"),
        Update_t=names("Global"),
        Embedding_t=names("DistributedSlotSparseEmbeddingHash"),
        Layer_t=names("InnerProduct", "ReLU", "Interaction", "BinaryCrossEntropyLoss"),
    )
    return fake
