"""Pack a place in a log, and the machine whose log it is, into a sequence, so that no other machine takes it for its own.

    bit  52                 51 … 38      37 … 0
         shared by Redis    machine      place in the machine's log

53 bits, because many JSON readers hold numbers as doubles. 2^38 events are 8 years of 1,000 a second. Machine 0 stands for the
machine that is asked.
"""

from __future__ import annotations

import hashlib
from typing import NamedTuple

import numpy as np

PLACE_BITS, MACHINE_BITS = 38, 14
PLACES, MACHINES = 1 << PLACE_BITS, 1 << MACHINE_BITS


class Origin(NamedTuple):
    """The origin of a sequence. machine: its number, 0 for the one that is asked; shared: whether other machines get it"""

    machine: int
    shared: bool
    place: int


def hash_machine(machine: str) -> int:
    """Return a number for a machine's name, 1 … 16,383. Two names may have the same number."""
    digest = int.from_bytes(hashlib.blake2b(machine.encode(), digest_size=8).digest(), "big")
    return 1 + digest % (MACHINES - 1)


def mark_sequences(places: np.ndarray, machine: str, shared: bool) -> np.ndarray:
    """Return the sequences of places in a machine's log, int64 [N]."""
    return places | np.int64(hash_machine(machine) << PLACE_BITS) | np.int64(shared << (PLACE_BITS + MACHINE_BITS))


def unpack_sequence(sequence: int) -> Origin:
    """Return where a sequence comes from."""
    return Origin((sequence >> PLACE_BITS) % MACHINES, bool(sequence >> (PLACE_BITS + MACHINE_BITS)), sequence % PLACES)
