"""Draw the instants at which requests are due: sorted float64 [N], in seconds from the start of the load."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from serving.contract.errors import ConfigError

BURST_FACTOR, BURST_S = 10.0, 0.5
VOLLEY = 8  # requests at the same instant
MAX_REQUESTS = 200_000  # of one load: a bound on memory and time


def draw_poisson(rate: float, duration_s: float, rng: np.random.Generator) -> np.ndarray:
    """Draw arrivals of independent users: exponential gaps, `rate` requests/s on average.

    Raises ConfigError beyond MAX_REQUESTS.
    """
    _check_load(rate, duration_s, rate * duration_s)
    return _draw_arrivals(rate, duration_s, rng)


def draw_bursts(rate: float, duration_s: float, rng: np.random.Generator, every_s: float = 5.0) -> np.ndarray:
    """Draw Poisson arrivals at `rate`, and BURST_FACTOR times that during the first BURST_S of every `every_s` but the first.

    The arrivals are thinned from a Poisson process at the peak rate. Raises ConfigError beyond MAX_REQUESTS.
    """
    whole, rest_s = divmod(duration_s, every_s)
    in_bursts_s = BURST_S * max(whole - 1, 0) + (min(rest_s, BURST_S) if whole else 0.0)
    _check_load(rate, duration_s, rate * (duration_s + (BURST_FACTOR - 1) * in_bursts_s))
    due_s = _draw_arrivals(rate * BURST_FACTOR, duration_s, rng)
    keep = is_in_burst(due_s, every_s) | (rng.random(len(due_s)) < 1.0 / BURST_FACTOR)
    return due_s[keep]


def make_volleys(rate: float, duration_s: float) -> np.ndarray:
    """Return VOLLEY requests at the same instant, then none until the next volley. This detects a batcher that sleeps.

    Under steady load such a fault stays hidden: each request wakes the batcher for the one before.
    """
    _check_load(rate, duration_s, rate * duration_s)
    starts_s = np.arange(0.0, duration_s, VOLLEY / rate)
    return np.repeat(starts_s, VOLLEY)


def is_in_burst(due_s: np.ndarray, every_s: float = 5.0) -> np.ndarray:
    """Return bool [N]: due within a burst. The first period has none and shows the quiet state."""
    return (due_s >= every_s) & (due_s % every_s < BURST_S)


def draw_recorded(times_s: np.ndarray, rate: float, duration_s: float, rng: np.random.Generator) -> np.ndarray:
    """Return arrivals in the log's rhythm: consecutive events from a random place, scaled to `duration_s` at a mean of `rate`.

    times_s: float64 [M] unix seconds, any order. A log shorter than the load starts over.
    """
    _check_load(rate, duration_s, rate * duration_s)
    count = max(round(rate * duration_s), 2)
    times_s = np.sort(np.asarray(times_s, np.float64))
    if not len(times_s):
        raise ConfigError("The log has no events; expected the times of at least two. Take another log.")
    laps = -(-count // len(times_s))
    if laps > 1:
        lap_s = np.ptp(times_s) * (1 + 1 / len(times_s))
        times_s = (times_s + lap_s * np.arange(laps)[:, None]).ravel()
    first = int(rng.integers(0, len(times_s) - count + 1))
    slice_s = times_s[first : first + count] - times_s[first]
    if slice_s[-1] <= 0:
        raise ConfigError(f"{count} recorded arrivals all came at the same time. Take a longer duration or a finer log.")
    return slice_s * (duration_s / slice_s[-1])


def read_times(source: str) -> np.ndarray:
    """Read float64 [M] unix seconds: from a text file with one time per line, or else the interactions of a data set."""
    if Path(source).is_file():
        try:
            times_s = np.loadtxt(source, dtype=np.float64, ndmin=1)
        except ValueError as error:
            raise ConfigError(f"{source}: {error}. Expected one arrival time in seconds per line.") from error
        if times_s.ndim != 1 or not np.isfinite(times_s).all():
            raise ConfigError(f"{source} has several columns, or a time that is not finite. Expected one time per line.")
        return times_s
    from training.dataset import load_dataset  # imported late: needs pandas

    return load_dataset(source).interactions["timestamp"].to_numpy(np.float64)


def _draw_arrivals(rate: float, duration_s: float, rng: np.random.Generator) -> np.ndarray:
    return np.sort(rng.uniform(0.0, duration_s, rng.poisson(rate * duration_s)))


def _check_load(rate: float, duration_s: float, expected: float) -> None:
    if not (rate > 0 and duration_s > 0):  # NaN neither
        raise ConfigError(f"Rate and duration must be positive, got {rate:g} requests/s for {duration_s:g} s.")
    if expected > MAX_REQUESTS:
        raise ConfigError(
            f"{rate:g} requests/s for {duration_s:g} s would send {expected:,.0f} requests; at most {MAX_REQUESTS:,} are "
            "sent in one load. Lower the rate or the duration."
        )
