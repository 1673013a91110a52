"""Print PSI and KL of the package `evidently` as JSON; run by experiments/drift.py in an environment of its own."""

import json
import sys

import numpy as np
import pandas as pd
from evidently.legacy.calculations.stattests import kl_div_stat_test, psi_stat_test
from evidently.legacy.core import ColumnType

arrays = np.load(sys.argv[1], allow_pickle=False)
values = {}
for name in sorted({key.split(".", 1)[1] for key in arrays.files}):
    reference, window = (pd.Series(arrays[f"{part}.{name}"]) for part in ("reference", "window"))
    kind = ColumnType.Numerical if reference.dtype.kind == "f" else ColumnType.Categorical
    values[name] = {
        "psi": float(psi_stat_test.func(reference, window, kind, 0.1)[0]),
        "kl": float(kl_div_stat_test.func(reference, window, kind, 0.1)[0]),
    }
print(json.dumps(values))
