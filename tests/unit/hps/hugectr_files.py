"""Read a model that an export wrote as HugeCTR's files, with the readers for foreign models."""

from pathlib import Path

from export.nvidia.hugectr.dense_file import read_dense_file
from export.nvidia.hugectr.foreign import read_foreign
from export.nvidia.hugectr.layers import DlrmLayers
from serving.tables.formats.sparse_folder import SparseTable, read_sparse_folder


def read_model(folder: Path, name: str) -> tuple[DlrmLayers, SparseTable]:
    network = read_foreign(folder / f"{name}.json")
    layers = read_dense_file(folder / f"{name}_dense_0.model", network.bottom, network.top)
    return layers, read_sparse_folder(folder / f"{name}0_sparse_0.model", network.width)
