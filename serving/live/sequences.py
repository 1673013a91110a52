"""Sequences where machines share their users: the place in a log, and whose log it is.

    bit  62                 61 … 47      46 … 0
         shared by Redis    machine      place in the machine's log

A machine that shares nothing returns the place alone, which is machine 0.
"""

from __future__ import annotations

import hashlib
from typing import NamedTuple

import numpy as np

PLACE_BITS, MACHINE_BITS = 47, 15
PLACES, MACHINES = 1 << PLACE_BITS, 1 << MACHINE_BITS


class Origin(NamedTuple):
    """Where a sequence comes from. machine: its number, 0 for one that shares nothing; shared: do other machines get it?"""

    machine: int
    shared: bool
    place: int


def number_of(machine: str) -> int:
    """Return the number of a machine's name, 1 … 32,767. Two names may have the same one."""
    digest = int.from_bytes(hashlib.blake2b(machine.encode(), digest_size=8).digest(), "big")
    return 1 + digest % (MACHINES - 1)


def mark_sequences(places: np.ndarray, machine: str, shared: bool) -> np.ndarray:
    """Return the sequences of places in a machine's log, int64 [N]."""
    return places | np.int64(number_of(machine) << PLACE_BITS) | np.int64(shared << (PLACE_BITS + MACHINE_BITS))


def origin_of(sequence: int) -> Origin:
    """Return where a sequence comes from."""
    return Origin((sequence >> PLACE_BITS) % MACHINES, bool(sequence >> (PLACE_BITS + MACHINE_BITS)), sequence % PLACES)
