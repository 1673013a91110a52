"""Import a DLRM that HugeCTR trained as the model of the rank stage: weights in this project's order, rows in its tables.

<folder>/<name>.json                      network, as `graph_to_json` writes it
<folder>/<name>_dense_<iteration>.model   weights
<folder>/<name>0_sparse_<iteration>.model rows
<folder>/<name>_inputs.json               the columns that it was trained on (export/nvidia/hugectr/inputs.py)

Exported columns that the model was not trained on get zeros as weights or as rows, so the answers are those of the original.
Below, `trained` are the inputs of HugeCTR's model, and `exported` those of the rank stage.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from export.nvidia.hugectr.dense_file import read_dense_file
from export.nvidia.hugectr.foreign import ForeignDlrm, read_foreign
from export.nvidia.hugectr.forward import compute_logits, find_slot_rows
from export.nvidia.hugectr.inputs import Inputs, read_inputs
from export.nvidia.hugectr.layers import DlrmLayers, Layer, compute_interaction_width
from serving.contract.errors import ArtifactError, ConfigError, ExportError
from serving.contract.tensors import PAD_ROW
from serving.tables.formats.sparse_folder import SparseTable, read_sparse_folder
from training.models.rankers.dlrm import DLRM, Shape

PARITY_ROWS, PARITY_LIMIT = 256, 1e-4


def import_dlrm(folder: Path, name: str, exported: Inputs, lists: frozenset[str] = frozenset()) -> DLRM:
    """Return a DLRM with the inputs `exported` that answers as the files do. lists: slots that hold several keys per item

    Raises ConfigError for an unservable network or unknown columns, ArtifactError for missing or broken files, ExportError when
    the imported model answers differently.
    """
    network, trained = read_foreign(folder / f"{name}.json"), read_inputs(folder / f"{name}_inputs.json")
    _refuse_other_columns(folder, name, network, trained, exported, lists)
    layers = read_dense_file(find_latest(folder, f"{name}_dense_"), network.bottom, network.top)
    rows = read_sparse_folder(find_latest(folder, f"{name}0_sparse_"), network.width)
    model = _build_model(exported, move_inputs(layers, trained, exported), make_tables(rows, trained, exported))
    _verify(model, layers, rows, trained, exported)
    return model


def find_latest(folder: Path, prefix: str) -> Path:
    """Return `<prefix><iteration>.model` of the highest iteration. Raises ArtifactError without one."""
    paths = {path.stem.removeprefix(prefix): path for path in folder.glob(f"{prefix}*.model")}
    numbered = {int(iteration): path for iteration, path in paths.items() if iteration.isdecimal()}
    if not numbered:
        raise ArtifactError(f"{folder} holds no {prefix}<iteration>.model. Expected HugeCTR's snapshot. Copy it there.")
    return numbered[max(numbered)]


def _refuse_other_columns(
    folder: Path, name: str, network: ForeignDlrm, trained: Inputs, exported: Inputs, lists: frozenset[str]
) -> None:
    path = folder / f"{name}_inputs.json"
    counts, expected = (len(trained.numbers), len(trained.slots)), (network.bottom[0][0], network.slots)
    if counts != expected:
        raise ConfigError(
            f"{path} names {counts[0]} numbers and {counts[1]} slots, the network has {expected[0]} and {expected[1]}. "
            "Expected equal. Correct the file."
        )
    sizes = {slot.name: slot.rows for slot in exported.slots}
    slot_names = [slot.name for slot in trained.slots]
    if unknown := sorted((set(trained.numbers) - set(exported.numbers)) | (set(slot_names) - sizes.keys())):
        raise ConfigError(
            f"{path} names {', '.join(unknown)}, which the data set lacks. Its numbers are {', '.join(exported.numbers)}; "
            f"its slots {', '.join(sizes)}. Import the model with the data set it was trained on."
        )
    if len({*trained.numbers, *slot_names}) != len(trained.numbers) + len(slot_names):
        raise ConfigError(f"{path} names a column twice. Expected each once. Correct the file.")
    for slot in trained.slots:
        if slot.rows != sizes[slot.name]:
            raise ConfigError(
                f"{path}: slot {slot.name} has {slot.rows} rows, the data set's encoding {sizes[slot.name]}. Expected equal: "
                "rows would mean other values. Train on the same log and settings as the export."
            )
        if slot.name in lists and network.combiner != "mean":
            raise ConfigError(
                f"{path}: slot {slot.name} holds lists, and the combiner is {network.combiner}. Expected mean. Train with it."
            )


def move_inputs(layers: DlrmLayers, trained: Inputs, exported: Inputs) -> DlrmLayers:
    """Return the same function of the exported inputs: rows of the first layers move to their numbers and pairs of slots."""
    first = layers.bottom[0]
    weight = np.zeros((len(exported.numbers), first.weight.shape[1]), np.float32)
    weight[[exported.numbers.index(name) for name in trained.numbers]] = first.weight
    names = [slot.name for slot in exported.slots]
    places = [names.index(slot.name) for slot in trained.slots]
    interacted = Layer(_place_pairs(layers.top[0].weight, layers.width, places, len(names)), layers.top[0].bias)
    return DlrmLayers((Layer(weight, first.bias), *layers.bottom[1:]), (interacted, *layers.top[1:]))


def _place_pairs(weight: np.ndarray, width: int, places: list[int], slots: int) -> np.ndarray:
    """Return a weight over the exported slots from one over the trained slots, both [D + pairs + 1, out].

    places: trained slot -> exported slot
    """
    rows = np.array([0, *(1 + place for place in places)])
    later, earlier = np.tril_indices(len(rows), -1)
    column = np.zeros((slots + 1, slots + 1), np.int64)
    column[np.tril_indices(slots + 1, -1)] = np.arange(slots * (slots + 1) // 2)
    high, low = np.maximum(rows[later], rows[earlier]), np.minimum(rows[later], rows[earlier])
    result = np.zeros((compute_interaction_width(width, slots), weight.shape[1]), np.float32)
    result[:width] = weight[:width]
    result[width + column[high, low]] = weight[width : width + len(later)]
    return result


def make_tables(rows: SparseTable, trained: Inputs, exported: Inputs) -> dict[str, np.ndarray]:
    """Return exported slot -> float32 [rows, D]; zeros for padding and for keys and slots that were not trained."""
    width, known_slots = rows.vectors.shape[1], {slot.name: slot for slot in trained.slots}
    tables = {}
    for slot in exported.slots:
        table = np.zeros((slot.rows, width), np.float32)
        if slot.name in known_slots:
            slot_keys = known_slots[slot.name].first_key + np.arange(slot.rows)
            table = find_slot_rows(np.asarray(rows.keys), np.asarray(rows.vectors), slot_keys).copy()
            table[PAD_ROW] = 0.0
        tables[slot.name] = table
    return tables


@torch.no_grad()
def _build_model(exported: Inputs, layers: DlrmLayers, tables: dict[str, np.ndarray]) -> DLRM:
    n_user_numbers = sum(name.startswith("user.") for name in exported.numbers)
    hidden = [tuple(layer.shape[1] for layer in stack[:-1]) for stack in (layers.bottom, layers.top)]
    sizes = (n_user_numbers, len(exported.numbers) - n_user_numbers, layers.width)
    model = DLRM(Shape(exported.user_slots, exported.item_slots, *sizes, bottom=hidden[0], top=hidden[1]))
    network = model.network
    for linear, layer in zip((*network.bottom, *network.top), (*layers.bottom, *layers.top), strict=True):
        linear.weight.copy_(torch.from_numpy(layer.weight.T.copy()))
        linear.bias.copy_(torch.from_numpy(layer.bias.copy()))
    for table, array in zip((*model.user_tables, *model.item_tables), tables.values(), strict=True):
        table.vectors.weight.copy_(torch.from_numpy(array))
    return model.eval()


@torch.no_grad()
def _verify(model: DLRM, layers: DlrmLayers, rows: SparseTable, trained: Inputs, exported: Inputs) -> None:
    """Raise ExportError unless the model answers random inputs as the files do."""
    rng = np.random.default_rng(0)
    numbers = rng.normal(size=(PARITY_ROWS, len(exported.numbers))).astype(np.float32)
    chosen = {slot.name: rng.integers(PAD_ROW + 1, slot.rows, PARITY_ROWS) for slot in exported.slots}
    keys = np.stack([slot.first_key + chosen[slot.name] for slot in trained.slots], axis=1)
    dense = numbers[:, [exported.numbers.index(name) for name in trained.numbers]]
    expected = compute_logits(layers, dense, find_slot_rows(np.asarray(rows.keys), np.asarray(rows.vectors), keys))
    logits = _compute_logits(model, numbers, [chosen[slot.name] for slot in exported.slots])
    difference = float(np.abs(logits - expected).max() / (1 + np.abs(expected).max()))
    if not difference <= PARITY_LIMIT:
        raise ExportError(f"The imported model differs from its files by {difference:.1e}. Report this as a bug.")


def _compute_logits(model: DLRM, numbers: np.ndarray, rows: list[np.ndarray]) -> np.ndarray:
    """Return float32 [N], one candidate per request. numbers: float32 [N, Gu + Gp]; rows: int64 [N] of each slot."""
    n_users, n_numbers = len(model.user_tables), model.shape.user_numbers
    user_rows = model.look_up_users(torch.from_numpy(np.stack(rows[:n_users], axis=1)))
    item_rows = model.look_up_items([torch.from_numpy(each[:, None, None]) for each in rows[n_users:]])
    values = torch.from_numpy(numbers)
    return model.network(values[:, :n_numbers], user_rows, values[:, None, n_numbers:], item_rows)[:, 0].numpy()
