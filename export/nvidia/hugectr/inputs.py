"""Name the inputs of a DLRM, in the order in which HugeCTR trains it.

<name>_inputs.json beside the model holds them: `numbers` of the dense input, `slots` of the sparse one with their first keys.
Because the file names them, a model with fewer inputs, or in another order, can be imported too.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from serving.contract.errors import ConfigError
from training.features.build import Features


@dataclass(frozen=True)
class Slot:
    """One categorical column: keys first_key … first_key + rows - 1 are rows 0 … of its table."""

    name: str
    rows: int
    first_key: int


@dataclass(frozen=True)
class Inputs:
    """numbers and slots in the model's order; names begin with `user.`, `item.` or `pair.`"""

    numbers: tuple[str, ...]
    slots: tuple[Slot, ...]

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")

    @property
    def user_slots(self) -> dict[str, int]:
        return {slot.name: slot.rows for slot in self.slots if slot.name.startswith("user.")}

    @property
    def item_slots(self) -> dict[str, int]:
        return {slot.name: slot.rows for slot in self.slots if slot.name.startswith("item.")}


def list_inputs(features: Features) -> Inputs:
    """Return the ranker's inputs in its own order: numbers of user, item and pair; slots of user and item."""
    sizes = {f"user.{name}": rows for name, rows in features.user_rows.items()}
    sizes |= {f"item.{name}": rows for name, rows in features.item_rows.items()}
    first = np.concatenate([[0], np.cumsum(list(sizes.values()))]).tolist()
    slots = tuple(Slot(name, rows, key) for (name, rows), key in zip(sizes.items(), first[:-1], strict=True))
    return Inputs(features.ranker_numbers, slots)


def read_inputs(path: Path) -> Inputs:
    """Read the inputs. Raises ConfigError when the file is missing or malformed."""
    try:
        raw = json.loads(path.read_text())
        return Inputs(tuple(raw["numbers"]), tuple(Slot(**slot) for slot in raw["slots"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path} does not name a model's inputs ({error!r}). Expected `numbers` and `slots` as `python -m export "
            "hugectr-data` writes them. Copy that file beside the model."
        ) from error
