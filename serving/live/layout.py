"""Layout of a store: the fixed-size records of users and items, and the description that the store keeps of them.

A record holds nothing that depends on a generation: the shop's ids and event times, never rows of an encoded category.
Declared aggregations are not in it, because generations may declare different ones: the processes that answer follow them in
memory (serving/stages/live/counts/trends.py).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from serving.contract.errors import ConfigError
from serving.contract.tensors import PAD_ID

SCHEMA = 1
HORIZONS_DAYS = (7.0, 30.0, 90.0)  # decayed popularity: the weight of an event falls by 1/e in each of these
LATEST_SECOND = 2**32 - 1  # times of a history are 32 bits wide


@dataclass(frozen=True)
class Layout:
    """Sizes and types of the records.

    history: latest positive events of a user, newest first; session: latest events of any kind, newest first
    """

    history: int = 64
    session: int = 16

    @cached_property
    def user(self) -> np.dtype:
        """Record of a user."""
        return np.dtype(
            [
                ("history_ids", "<i8", (self.history,)),  # padded with PAD_ID
                ("session_ids", "<i8", (self.session,)),  # padded with PAD_ID
                ("session_ms", "<i8", (self.session,)),
                ("event_count", "<i8"),  # of kinds in the interaction log, as in the sums, first_ms, last_ms
                ("sum_weight", "<f8"),
                ("sum_label", "<f8"),
                ("first_ms", "<i8"),
                ("last_ms", "<i8"),
                ("received_ms", "<i8"),  # wall clock of the latest event, for eviction
                ("history_s", "<u4", (self.history,)),
                ("session_values", "<f4", (self.session,)),
                ("session_kinds", "<u1", (self.session,)),
            ],
            align=True,
        )

    @cached_property
    def item(self) -> np.dtype:
        """Record of an item. It counts live events only; earlier ones are in the generation."""
        return np.dtype(
            [
                ("event_count", "<i8"),  # of any kind
                ("positive_count", "<i8"),
                ("first_ms", "<i8"),  # of positive events, 0 without one
                ("last_ms", "<i8"),
                ("decayed", "<f8", (len(HORIZONS_DAYS),)),  # positive events, as of last_ms
            ],
            align=True,
        )

    @cached_property
    def _empty_user(self) -> np.ndarray:
        record = np.zeros(1, self.user)
        record["history_ids"] = record["session_ids"] = PAD_ID
        return record

    def make_empty_users(self, count: int) -> np.ndarray:
        """Return [count] records of users without events."""
        return np.repeat(self._empty_user, count)

    def make_empty_items(self, count: int) -> np.ndarray:
        """Return [count] records of items without events."""
        return np.zeros(count, self.item)

    def to_json(self) -> bytes:
        """Return the description that the store keeps."""
        return json.dumps({"schema": SCHEMA, "history": self.history, "session": self.session}, sort_keys=True).encode()

    @classmethod
    def from_json(cls, text: bytes) -> Layout:
        """Read what `to_json` wrote. Raises ConfigError for a store of another schema."""
        fields = json.loads(text)
        if fields["schema"] != SCHEMA:
            raise ConfigError(
                f"The live store has schema {fields['schema']}; this program reads schema {SCHEMA}. "
                "Run the program that wrote it, or move the folder away."
            )
        return cls(fields["history"], fields["session"])


def find_offset(dtype: np.dtype, name: str) -> int:
    """Return the byte at which a field of a structured dtype begins."""
    assert dtype.fields is not None  # it is structured
    return dtype.fields[name][1]
