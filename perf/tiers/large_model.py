"""The rank stage over a large table: what `large.py` writes as its `model.py`. It runs the published code beside it.

large/: tiers.json, keys.npy int64 [R, C]
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import numpy as np
from large_catalogue import over

from stages.embeddings.tiers import Tiers
from stages.rank import Rank
from stages.triton import triton_model


class LargeRank:
    @staticmethod
    def load(folder):
        rank = Rank.load(folder)
        rank.close()  # its own tables: those of large/ take their place
        return over(rank, Tiers.load(folder / "large"), np.load(folder / "large" / "keys.npy", mmap_mode="r"))


TritonPythonModel = triton_model(LargeRank)
