"""The bounds of the off-policy experiment: an estimator that a log cannot support misses its bound, and is not left out."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

from experiments.off_policy import measure

DECISIONS = 4_500
SHOWN = {"random": [0.25] * 4, "bts": [0.94, 0.02, 0.02, 0.02]}  # probability of each item


def write_logs(folder: Path) -> None:
    """Write two logs of three positions; the second policy shows nearly always the same item."""
    rng = np.random.default_rng(0)
    for name, shown in SHOWN.items():
        items = rng.choice(4, DECISIONS, p=shown)
        log = pd.DataFrame(
            {
                "item_id": items,
                "position": np.arange(DECISIONS) % 3 + 1,
                "click": (rng.random(DECISIONS) < 0.2).astype(int),
                "propensity_score": np.array(shown)[items],
            }
        )
        (folder / name).mkdir()
        log.to_csv(folder / name / "men.csv.gz", index=False)


def test_estimates_of_slates_have_the_bound_of_single_decisions(tmp_path):
    write_logs(tmp_path)
    figures = {figure.name: figure for figure in measure(tmp_path, False)}
    bounded = {name: figure for name, figure in figures.items() if "whose interval holds" in name}
    assert all(figure.at_least == 9 for figure in bounded.values())
    for kind in ("standard", "independent", "cascade"):
        names = [f"{judged}, slates, {kind}: seeds of 10 whose interval holds the truth" for judged in SHOWN]
        assert bounded.keys() >= set(names)
    refused = bounded["random, slates, standard: seeds of 10 whose interval holds the truth"]
    assert (refused.median, refused.met) == (0, False)
    assert figures["random, slates, standard: seeds of 10 whose interval does not"].met  # a refusal is no wrong interval
