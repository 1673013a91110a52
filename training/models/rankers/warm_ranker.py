"""Keep the weights of the ranker's DLRM and of its student, and start the next generation's from them.

    <folder>/ranker.npz, student.npz   weights of the network; of each table its rows, and the value that each belongs to

A generation counts values anew, so the rows of a table are in another order. They are matched by value: a user id, an item id,
a category. A new value starts with the vector of unknown ones (OOV), which it had before. Favourite categories are codes, which
change with the catalogue: they are matched by name.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from serving.contract.tensors import OOV_ROW
from serving.stages.features.encode import FIRST_ROW, Plan, StringVocabulary
from training.features.build import Features
from training.models.rankers.dlrm import DLRM, Table
from training.models.rankers.train_ranker import Ranker
from training.models.warm_start import read_weights, write_weights

RANKER, STUDENT = "ranker", "student"
NUMBERS = "names of numbers"
FAVOURITES = ("favourite_category_1", "favourite_category_2")
STANDARDISATION = ("mean", "scale")  # of the network's numbers; a generation has its own


def write_ranker(folder: Path, features: Features, ranker: Ranker, generations: int) -> None:
    """Write the weights of a ranker, and of the DLRM that it imitates, if there is one.

    Call it before the standardisation is folded into the first layer: the next generation has another one.
    generations: how many in a row have started from the weights of the one before
    """
    models = {RANKER: ranker.teacher or ranker.model, STUDENT: ranker.model if ranker.teacher else None}
    for file_name, model in models.items():
        if model is None:
            continue
        arrays = {name: value.numpy() for name, value in _list_weights(model).items()} | {
            NUMBERS: np.array(features.ranker_numbers)
        }
        tables = _name_tables(features, model)
        for name, values in _list_values(features).items():
            arrays |= {f"rows of {name}": tables[name].array(), f"values of {name}": values}
        write_weights(folder, file_name, arrays, generations)


def start_ranker(folder: Path, features: Features, model: DLRM) -> bool:
    """Set a new DLRM, or a new student, to the kept weights that fit its shape, and return True.

    Return False, and leave the model as it is, where none fit. Raises ArtifactError for a file that cannot be read.

    features: those that the model is trained on
    """
    paths = (folder / f"{name}.npz" for name in (RANKER, STUDENT))
    return any(_start(model, features, read_weights(path)) for path in paths if path.exists())


@torch.no_grad()
def _start(model: DLRM, features: Features, kept_weights: dict[str, np.ndarray]) -> bool:
    tables, weights = _name_tables(features, model), _list_weights(model)
    if kept_weights.get(NUMBERS, np.array([])).tolist() != list(features.ranker_numbers):
        return False
    if any(name not in kept_weights or kept_weights[name].shape != tuple(value.shape) for name, value in weights.items()):
        return False
    started: dict[str, torch.Tensor] = {}
    for name, values in _list_values(features).items():
        rows, kept_values = kept_weights.get(f"rows of {name}"), kept_weights.get(f"values of {name}")
        if rows is None or kept_values is None or rows.shape[1] != model.shape.width:
            return False
        started[name] = torch.from_numpy(rows[_match_rows(values, kept_values)])
    for name, value in weights.items():
        value.copy_(torch.from_numpy(kept_weights[name]))
    for name, table in tables.items():
        table.vectors.weight.copy_(started[name][table.owners])
    return True


def _name_tables(features: Features, model: DLRM) -> dict[str, Table]:
    """Return the tables by side and column."""
    names = (f"{side} {name}" for side, plan in _list_plans(features).items() for name in plan.rows)
    return dict(zip(names, model.tables, strict=True))


def _list_plans(features: Features) -> dict[str, Plan]:
    return {"user": features.user_plan, "item": features.item_plan}


def _list_weights(model: DLRM) -> dict[str, torch.Tensor]:
    return {name: value for name, value in model.network.state_dict().items() if name not in STANDARDISATION}


def _list_values(features: Features) -> dict[str, np.ndarray]:
    """Return, by table, the value of each row from FIRST_ROW on: an integer or a string.

    A column whose values are hashed or binned has no vocabulary. The value of a row is its name, which is no integer: once a
    column has so many values that they are hashed, the id 7 must not be taken for row 7.
    """
    values = {}
    for side, plan in _list_plans(features).items():
        for name, n_rows in plan.rows.items():
            vocabulary = plan.vocabularies.get(name)
            if vocabulary is None:
                rows = np.arange(FIRST_ROW, n_rows)
                known = np.array([f"row {row}" for row in rows.tolist()], str)
            elif isinstance(vocabulary, StringVocabulary):
                known = np.array(vocabulary.values, str)
                rows = vocabulary(np.array(vocabulary.values, object))
            else:
                is_value = vocabulary.rows >= FIRST_ROW
                known, rows = vocabulary.keys[is_value], vocabulary.rows[is_value]
                known = np.array(features.categories.names, str)[known] if name in FAVOURITES else known
            values[f"{side} {name}"] = known[np.argsort(rows)]
    return values


def _match_rows(values: np.ndarray, kept_values: np.ndarray) -> np.ndarray:
    """Return the kept row for each row of a table, int64 [FIRST_ROW + len(values)]; OOV_ROW for new values."""
    kept_rows = {value: row for row, value in enumerate(kept_values.tolist(), start=FIRST_ROW)}
    return np.array([*range(FIRST_ROW), *(kept_rows.get(value, OOV_ROW) for value in values.tolist())])
