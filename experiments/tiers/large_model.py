"""The rank stage over a large table: what `large.py` writes as its `model.py`. It runs the published code beside it.

large/: tiers.json, keys.npy int64 [R, C]
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import numpy as np
from large_catalogue import over

from serving.stages.adapter.triton import triton_model
from serving.stages.rank import Rank
from serving.tables.store.tiers import Tiers


class LargeRank:
    @staticmethod
    def load(folder):
        rank = Rank.load(folder)
        rank.close()  # its own tables: those of large/ take their place
        return over(rank, Tiers.load(folder / "large"), np.load(folder / "large" / "keys.npy", mmap_mode="r"))


TritonPythonModel = triton_model(LargeRank)
