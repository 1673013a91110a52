"""Off-policy estimates on a real log with known propensities, against the true on-policy value and against the package `obp`.

    python -m experiments.off_policy

The Open Bandit data set has logs of two policies that a fashion shop ran side by side: uniform random, and Bernoulli Thompson
sampling. From each log alone we estimate the click rate of the other policy, and compare it with the rate that it really
had. Each of ten seeds takes a random half of both logs; with at least nine,

- the estimate's interval must hold the click rate of the other policy's whole log
- the interval of the difference between the estimate and the click rate of the other policy's half must hold 0: both are
  samples (46 and 69 clicks in the whole logs)

The interval of an estimate of slates must hold the sum of the click rates of the positions. A half that is refused does not
count as one that holds it, nor as a wrong interval: its 23 or 35 clicks are few for products of weights.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Annotated, get_args

import numpy as np
import pandas as pd
import typer

from experiments.harness import RESULTS, Figure, ResultsFolder, finish, read_machine
from experiments.other_environment import run_in_environment
from perf.command import run
from trials.off_policy import (
    Estimate,
    SlateKind,
    TrialError,
    compute_importance_weights,
    estimate_dr,
    estimate_ips,
    estimate_slate,
    estimate_slate_dr,
    estimate_slate_snips,
    estimate_snips,
)

DATA = Path(__file__).parents[2] / "shared/data/open-bandit-men"
# obp 0.5.7, the first with self-normalised slates, pins versions that no current Python has: it is installed without them.
OBP_NEEDS = ("pandas==3.1.1", "scikit-learn==1.9.1", "matplotlib==3.11.2", "seaborn==0.13.2", "PyYAML", "tqdm", "torch==2.13.0")
OBP = ("obp==0.5.7",)
SEEDS = 10
LEAST_HOLDING, MOST_WRONG = 9, 1  # of SEEDS
MOST_DIFFERENCE = 1e-6
SLATES: dict[str, SlateKind] = {f"slates, {kind}": kind for kind in get_args(SlateKind)}
PRIOR_SHOWN = 1_000.0  # decisions by which an item's click rate is drawn to that of all

Verdicts = dict[str, list[bool]]  # by estimator, one of each half that was not refused


def estimate_policy(frame: pd.DataFrame, items: int, positions: int) -> np.ndarray:
    """Return the probability of each item at each position, float64 [positions, items]: mean of the logged propensities.

    Thompson sampling's propensities move little within the log's week. Items that it never showed get none.
    """
    means = frame.groupby(["position", "item_id"])["propensity_score"].mean()
    table = np.zeros((positions, items))
    for (position, item), value in means.items():
        table[position - 1, item] = value
    return table / table.sum(axis=1, keepdims=True)


def estimate_rewards(frame: pd.DataFrame, rows: np.ndarray, items: int) -> np.ndarray:
    """Return the click rate of each item for each row, float64 [rows, items], learned from the other half of the log.

    Cross-fitting: a reward model that had seen a decision would make the doubly robust estimate too sure.
    """
    halves = np.arange(len(rows)) % 2
    rates = np.empty((2, items))
    for half in range(2):
        other = frame.iloc[rows[halves != half]]
        clicks = np.bincount(other["item_id"], other["click"], minlength=items)
        shown = np.bincount(other["item_id"], minlength=items)
        rates[half] = (clicks + PRIOR_SHOWN * other["click"].mean()) / (shown + PRIOR_SHOWN)
    return rates[halves]


def estimate_all(
    frame: pd.DataFrame, rows: np.ndarray, policy: np.ndarray
) -> tuple[dict[str, Estimate], dict[str, np.ndarray]]:
    """Return the estimates from the chosen rows, and the arrays that they were computed from."""
    log = frame.iloc[rows]
    items = log["item_id"].to_numpy()
    target = policy[log["position"].to_numpy() - 1]
    rewards, propensities = log["click"].to_numpy(np.float64), log["propensity_score"].to_numpy(np.float64)
    chosen = np.arange(len(rows)), items
    weights, expected = compute_importance_weights(target[chosen], propensities), estimate_rewards(frame, rows, policy.shape[1])
    estimates = {
        "IPS": estimate_ips(rewards, weights),
        "SNIPS": estimate_snips(rewards, weights),
        "DR": estimate_dr(rewards, weights, expected[chosen], (target * expected).sum(axis=1)),
    }
    arrays = {"rewards": rewards, "actions": items, "propensities": propensities}
    return estimates, arrays | {"target_distribution": target, "expected_rewards": expected}


def estimate_slates(frame: pd.DataFrame, policy: np.ndarray) -> tuple[dict[str, Estimate], dict[str, np.ndarray]]:
    """Return the slate estimates but for those that are refused, and the arrays that they were computed from.

    The log has the positions of a slate apart; here, a slate is the n-th decision of each position.
    """
    slates = list_slates(frame)
    rewards, propensities, targets = read_slates(frame, slates, policy)
    weights, ways = compute_importance_weights(targets, propensities), dict[str, Callable[[], Estimate]]()
    for name, kind in SLATES.items():
        ways[name] = partial(estimate_slate, rewards, weights, kind)
    return keep_supported(ways), {"slate_rewards": rewards, "slate_propensities": propensities, "slate_targets": targets}


def estimate_other_slates(frame: pd.DataFrame, policy: np.ndarray) -> tuple[dict[str, Estimate], dict[str, np.ndarray]]:
    """Return the other slate estimates that obp has too, without refused ones, and the arrays that DR needs in addition."""
    slates = list_slates(frame)
    items = frame["item_id"].to_numpy()[slates]
    rewards, propensities, targets = read_slates(frame, slates, policy)
    weights, expected = (
        compute_importance_weights(targets, propensities),
        estimate_rewards(frame, slates.ravel(), policy.shape[1]),
    )
    expected = expected.reshape(*slates.shape, -1)
    of_shown = np.take_along_axis(expected, items[:, :, None], axis=2)[:, :, 0]
    of_target = (policy * expected).sum(axis=2)
    ways: dict[str, Callable[[], Estimate]] = {
        "slates, independent DR": partial(estimate_slate_dr, rewards, weights, of_shown, of_target, "independent")
    }
    for kind in get_args(SlateKind):
        ways[f"slates, {kind} SNIPS"] = partial(estimate_slate_snips, rewards, weights, kind)
    return keep_supported(ways), {"slate_items": items, "slate_expected_rewards": expected, "slate_policy": policy}


def list_slates(frame: pd.DataFrame) -> np.ndarray:
    """Return the rows of each slate, int64 [slates, positions]."""
    rows = [np.flatnonzero(frame["position"] == position) for position in np.unique(frame["position"])]
    count = min(map(len, rows))
    return np.stack([position_rows[:count] for position_rows in rows], axis=1)


def read_slates(frame: pd.DataFrame, slates: np.ndarray, policy: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (rewards, propensities, target probabilities) of the shown items, float64 [slates, positions]."""
    items = frame["item_id"].to_numpy()[slates]
    rewards = frame["click"].to_numpy(np.float64)[slates]
    return rewards, frame["propensity_score"].to_numpy()[slates], policy[np.arange(slates.shape[1]), items]


def keep_supported(ways: dict[str, Callable[[], Estimate]]) -> dict[str, Estimate]:
    """Return the estimates, without those that the log does not support."""
    estimates = {}
    for name, estimate in ways.items():
        with suppress(TrialError):
            estimates[name] = estimate()
    return estimates


def may_be_equal(estimate: Estimate, on_policy: Estimate) -> bool:
    """Return whether the interval of estimate - on_policy, of two independent samples, holds 0."""
    if estimate.value < on_policy.value:
        sides = estimate.high - estimate.value, on_policy.value - on_policy.low
    else:
        sides = estimate.value - estimate.low, on_policy.high - on_policy.value
    return abs(estimate.value - on_policy.value) <= float(np.hypot(*sides))


def sum_position_rates(frame: pd.DataFrame) -> float:
    """Return the mean clicks of a slate: the click rates of its positions, added up."""
    return float(frame.groupby("position")["click"].mean().sum())


def judge_halves(log: pd.DataFrame, policy: np.ndarray, on_policy: pd.DataFrame) -> tuple[Verdicts, Verdicts]:
    """Compare the estimates of SEEDS halves of the log with the on-policy click rate.

    Returns whether the estimate's interval holds the rate of the whole on-policy log, and whether the estimate may be equal to
    the rate of a half of it (not of slates).
    """
    holding, equal = defaultdict[str, list[bool]](list), defaultdict[str, list[bool]](list)
    click_rate, of_slates = on_policy["click"].mean(), sum_position_rates(on_policy)
    for seed in range(SEEDS):
        generator = np.random.default_rng(seed)
        rows, others = (generator.permutation(len(frame))[: len(frame) // 2] for frame in (log, on_policy))
        clicks = on_policy["click"].to_numpy(np.float64)[others]
        half = estimate_ips(clicks, np.ones(len(clicks)))
        for name, estimate in estimate_all(log, rows, policy)[0].items():
            holding[name].append(estimate.low <= click_rate <= estimate.high)
            equal[name].append(may_be_equal(estimate, half))
        for name, estimate in estimate_slates(log.iloc[np.sort(rows)], policy)[0].items():
            holding[name].append(estimate.low <= of_slates <= estimate.high)
    return holding, equal


def to_figure(name: str, estimate: Estimate) -> Figure:
    """Return an estimate with the ends of its interval."""
    return Figure(name=name, values=[100 * end for end in (estimate.low, estimate.value, estimate.high)], unit="%")


def measure(data: Path, compare_with_obp: bool) -> list[Figure]:
    columns = ["item_id", "position", "click", "propensity_score"]
    logs = {name: pd.read_csv(data / name / "men.csv.gz", usecols=columns) for name in ("random", "bts")}
    items, positions = (1 + int(logs["random"]["item_id"].max()), int(logs["random"]["position"].max()))
    figures, differences = [], defaultdict[str, list[float]](list)
    for logged, judged in (("random", "bts"), ("bts", "random")):
        log, on_policy = logs[logged], logs[judged]
        policy = estimate_policy(on_policy, items, positions)
        estimates, arrays = estimate_all(log, np.arange(len(log)), policy)
        slates, slate_arrays = estimate_slates(log, policy)
        holding, equal = judge_halves(log, policy, on_policy)
        rate, effective = 100 * float(on_policy["click"].mean()), estimates["IPS"].effective_samples
        figures.append(Figure(name=f"{judged}, click rate as it was", values=[rate], unit="%"))
        figures.append(Figure(name=f"{judged}, effective decisions in the other log", values=[effective]))
        for name, estimate in estimates.items():
            figures.append(to_figure(f"{judged}, {name}: estimate", estimate))
            for question, verdicts in (
                ("whose interval holds the truth", holding),
                ("that agree with half of the other log", equal),
            ):
                title = f"{judged}, {name}: seeds of {SEEDS} {question}"
                figures.append(Figure(name=title, values=[sum(verdicts[name])], at_least=LEAST_HOLDING))
        clicks = [100 * sum_position_rates(on_policy)]
        figures.append(Figure(name=f"{judged}, slates, clicks of {positions} positions as they were", values=clicks, unit="%"))
        for name in SLATES:
            if name in slates:
                figures.append(to_figure(f"{judged}, {name}: estimate", slates[name]))
            figures.append(Figure(name=f"{judged}, {name}: seeds of {SEEDS} with an estimate", values=[len(holding[name])]))
            title = f"{judged}, {name}: seeds of {SEEDS} whose interval holds the truth"
            figures.append(Figure(name=title, values=[sum(holding[name])], at_least=LEAST_HOLDING))
            wrong = f"{judged}, {name}: seeds of {SEEDS} whose interval does not"
            figures.append(Figure(name=wrong, values=[len(holding[name]) - sum(holding[name])], at_most=MOST_WRONG))
        if compare_with_obp:
            others, more_arrays = estimate_other_slates(log, policy)
            script = Path(__file__).with_name("off_policy_obp.py")
            reference = run_in_environment("obp", OBP_NEEDS, script, arrays | slate_arrays | more_arrays, OBP)
            for name, estimate in (estimates | slates | others).items():
                differences[name].append(abs(reference[name] - estimate.value))
    return figures + make_difference_figures(differences)


def make_difference_figures(differences: Mapping[str, Sequence[float]]) -> list[Figure]:
    """Return the largest difference from obp by estimator, NaN if one is. differences: by estimator, one of each log"""
    return [
        Figure(
            name=f"{name}, largest difference from obp, of {len(values)} logs",
            values=[float(np.max(values))],
            at_most=MOST_DIFFERENCE,
        )
        for name, values in differences.items()
    ]


def main(
    data: Annotated[Path, typer.Option(help="folder of the Open Bandit data set")] = DATA,
    results: ResultsFolder = RESULTS,
) -> None:
    """Judge a policy from another one's log. Exit code 1 when an interval misses the truth too often, or obp differs."""
    machine, figures = read_machine(), measure(data, compare_with_obp=True)
    conditions = (
        "Open Bandit data set, campaign men, 10,000 decisions of each policy; the ends of an estimate are its 95 % interval"
    )
    finish("off-policy", "Off-policy estimates", "python -m experiments.off_policy", conditions, figures, results, machine)


if __name__ == "__main__":
    run(main, "python -m experiments.off_policy")
