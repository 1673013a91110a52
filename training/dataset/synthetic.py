"""Generate learnable data sets of any size from a seed, without files or network.

The model: a user has a latent taste; items belong to departments (clusters of the same latent space) and have Zipf popularity.
For each event four items are drawn by popularity from departments that the user likes; the user takes the one that best fits
taste, season (every item has a time of the year) and, where the data set has one, context. Some events are followed by the
item's companion, so that the order of a history carries information. Feature columns are noisy views of the latent factors.

    load_dataset("synthetic:small")      load_dataset("synthetic:users=10000,items=5000,events=200000,seed=7,context=1")
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import pandas as pd

from serving.contract.errors import DataError
from training.dataset.dataset import Dataset, Report
from training.dataset.description import Context, Description, Interactions, Items, Users

START_S = 1_672_531_200  # 2023-01-01 UTC; the log covers one year
YEAR_S = 365 * 86_400
N_FACTORS = 8
N_DRAWN = 4  # items an event chooses from
COMPANION_SHARE = 0.15  # events that are the companion of the user's previous item
N_STORES = 20
DEVICES = np.array(["desktop", "phone", "tablet", "till"], object)
CHUNK_EVENTS = 250_000


@dataclass(frozen=True)
class SyntheticSpec:
    """Sizes. context=1 adds the request-time columns store (integer), device (string) and temperature (continuous)."""

    users: int
    items: int
    events: int
    seed: int = 0
    context: int = 0


NAMED = {
    "tiny": SyntheticSpec(users=60, items=40, events=1_000),
    "small": SyntheticSpec(users=500, items=300, events=10_000),
    "reference": SyntheticSpec(users=200_000, items=100_000, events=2_500_000),  # the data set of all speed figures
}


@dataclass(frozen=True)
class _Latent:
    """user: f4 [U, F]; item: f4 [I, F]; department: i8 [I], ascending; centre: f4 [departments, F]; peak: f4 [I], in years."""

    user: np.ndarray
    item: np.ndarray
    department: np.ndarray
    centre: np.ndarray
    peak: np.ndarray


def parse_spec(text: str) -> SyntheticSpec:
    """Parse the text after "synthetic:": a name of NAMED, or key=number pairs. Raises DataError."""
    if text in NAMED:
        return NAMED[text]
    keys = [field.name for field in fields(SyntheticSpec)]
    numbers: dict[str, int] = {}
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\w+)\s*=\s*(\d+(?:_\d+)*)\s*", part)
        if not match or match[1] not in keys:
            raise DataError(
                f"synthetic:{text}: {part!r} is not understood. Expected one of {', '.join(NAMED)}, or pairs like "
                f"users=1000,items=500,events=20000 with the keys {', '.join(keys)}. Correct the name."
            )
        numbers[match[1]] = int(match[2])
    absent = [key for key in ("users", "items", "events") if key not in numbers]
    if absent:
        raise DataError(f"synthetic:{text}: {absent[0]} is not given. Add {absent[0]}=<number>.")
    spec = SyntheticSpec(**numbers)
    if spec.users < 1 or spec.items < 16 or spec.events < spec.users or spec.context > 1:
        raise DataError(
            f"synthetic:{text}: these sizes make no data set. Take users >= 1, items >= 16, events >= users, context 0 or 1."
        )
    return spec


def generate(spec: SyntheticSpec) -> Dataset:
    """Return the data set of a spec; equal specs give equal data sets."""
    rng = np.random.default_rng(spec.seed)
    latent = _draw_latent(spec, rng)
    item_id = rng.permutation(spec.items).astype(np.int64) + 1  # ids in random order carry no information
    user, time = _draw_visits(spec, rng)
    context = _draw_context(len(user), rng) if spec.context else {}
    item = _choose(latent, user, time, context, rng)
    log = {"user_id": user + 1, "item_id": item_id[item], "timestamp": START_S + (time * YEAR_S).astype(np.int64)}
    log |= {"positive": np.ones(len(user), bool), "weight": np.ones(len(user), np.float32)}
    log |= {"label": np.full(len(user), np.nan, np.float32), **context}
    interactions = pd.DataFrame(log).sort_values("timestamp", kind="stable", ignore_index=True)
    report = Report(rows_read=len(interactions))
    return Dataset(_describe(spec), interactions, _draw_items(latent, item_id, rng), _draw_users(latent, rng), report=report)


def _describe(spec: SyntheticSpec) -> Description:
    keys = ",".join(f"{field.name}={getattr(spec, field.name)}" for field in fields(spec))
    name = next((name for name, named_spec in NAMED.items() if named_spec == spec), keys)
    path = "generated"
    return Description(
        name=f"synthetic:{name}",
        interactions=Interactions(path=path, user_id="user_id", item_id="item_id", timestamp="timestamp"),
        items=Items(
            path=path,
            item_id="item_id",
            title="title",
            categorical=["department", "shelf", "brand", "colour", "size"],
            continuous=["price", "weight_kg"],
            category="department",
            provider="brand",
        ),
        users=Users(
            path=path,
            user_id="user_id",
            categorical=["segment", "age_band", "plan", "region"],
            continuous=["income", "tenure_days", "distance_km"],
        ),
        context=Context(categorical=["store", "device"], continuous=["temperature"]) if spec.context else Context(),
    )


def _draw_latent(spec: SyntheticSpec, rng: np.random.Generator) -> _Latent:
    n_departments = int(np.clip(spec.items // 40, 4, 64))
    centre = rng.normal(size=(n_departments, N_FACTORS)).astype(np.float32)
    department = np.sort(rng.integers(0, n_departments, spec.items))
    item = centre[department] + 0.6 * rng.normal(size=(spec.items, N_FACTORS)).astype(np.float32)
    user = rng.normal(size=(spec.users, N_FACTORS)).astype(np.float32)
    peak = rng.uniform(-0.3, 1.3, spec.items).astype(np.float32)
    return _Latent(user, item, department, centre, peak)


def _make_zipf_weights(n: int, offset: float) -> np.ndarray:
    """Return weights 1 / (rank + offset), f8 [n], summing to 1."""
    weights = 1 / (np.arange(n) + 1 + offset)
    return weights / weights.sum()


def _draw_visits(spec: SyntheticSpec, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Return user i8 [E] and time f8 [E] in years, sorted by user, then time. Every user has at least one event."""
    n_each = min(3, spec.events // spec.users)
    activity = _make_zipf_weights(spec.users, offset=10 + spec.users / 100)  # the offset limits the busiest user
    n_events = n_each + rng.multinomial(spec.events - n_each * spec.users, rng.permutation(activity))
    user = np.repeat(np.arange(spec.users), n_events)
    joined = rng.uniform(0, 0.5, spec.users)[user]
    time = joined + (1 - joined) * rng.random(spec.events)
    order = np.lexsort((time, user))
    return user, time[order]  # user is sorted already


def _draw_context(n_events: int, rng: np.random.Generator) -> dict[str, Any]:
    return {
        "store": pd.array(rng.integers(1, N_STORES + 1, n_events), dtype="Int64"),
        "device": DEVICES[rng.choice(len(DEVICES), n_events, p=[0.4, 0.4, 0.1, 0.1])],
        "temperature": rng.normal(15, 8, n_events).astype(np.float32),
    }


def _choose(
    latent: _Latent, user: np.ndarray, time: np.ndarray, context: dict[str, Any], rng: np.random.Generator
) -> np.ndarray:
    """Return the latent item of each event, i8 [E]."""
    n_departments = len(latent.centre)
    affinity = np.exp(1.2 * latent.user @ latent.centre.T)
    # One flat, ascending array for all users: row u goes from u to u + 1, so one searchsorted draws for every event.
    department_ends = np.cumsum(affinity / affinity.sum(axis=1, keepdims=True), axis=1, dtype=np.float64)
    department_ends = (department_ends / department_ends[:, -1:] + np.arange(len(affinity))[:, None]).ravel()
    # Likewise department d goes from d to d + 1 over its items, the first ones being the popular ones.
    n_items = np.bincount(latent.department, minlength=n_departments)
    item_ends = np.concatenate([d + np.cumsum(_make_zipf_weights(n, offset=2.0)) for d, n in enumerate(n_items) if n])
    store_preference = rng.normal(size=(N_STORES + 1, n_departments)).astype(np.float32)  # by store and department
    item = np.empty(len(user), np.int64)
    for start in range(0, len(user), CHUNK_EVENTS):
        chunk = slice(start, start + CHUNK_EVENTS)
        shape = (len(user[chunk]), N_DRAWN)
        department = np.searchsorted(department_ends, user[chunk, None] + rng.random(shape)) - user[chunk, None] * n_departments
        drawn_items = np.searchsorted(item_ends, np.clip(department, 0, n_departments - 1) + rng.random(shape))
        drawn_items = np.minimum(drawn_items, len(latent.item) - 1)
        utility = 0.5 * np.einsum("ef,enf->en", latent.user[user[chunk]], latent.item[drawn_items])
        utility -= 6 * (time[chunk, None] - latent.peak[drawn_items]) ** 2
        if context:
            utility += store_preference[np.asarray(context["store"][chunk], np.int64)[:, None], latent.department[drawn_items]]
        item[chunk] = drawn_items[np.arange(len(drawn_items)), np.argmax(utility + rng.gumbel(size=shape), axis=1)]
    return _with_companions(item, user, len(latent.item), rng)


def _with_companions(item: np.ndarray, user: np.ndarray, n_items: int, rng: np.random.Generator) -> np.ndarray:
    """Replace a share of the events by the companion of the user's previous item; items 2k and 2k+1 are companions."""
    companion = np.minimum(item[:-1] ^ 1, n_items - 1)
    follows = (user[1:] == user[:-1]) & (rng.random(len(companion)) < COMPANION_SHARE)
    return np.concatenate([item[:1], np.where(follows, companion, item[1:])])


def _to_bands(values: np.ndarray, n: int) -> np.ndarray:
    """Return the band of each value, i8, of n bands of a standard normal; the outer bands are rare."""
    return np.digitize(values, np.linspace(-1.6, 1.6, n - 1))


def _to_labels(prefix: str, codes: np.ndarray, rng: np.random.Generator, missing: float = 0.0) -> np.ndarray:
    """Return object of "prefix 7" for code 7, None for a share `missing` of the rows."""
    names = np.array([f"{prefix} {code}" for code in range(int(codes.max()) + 1)], object)
    labels = names[codes]
    labels[rng.random(len(codes)) < missing] = None
    return labels


def _drop_some(values: np.ndarray, rng: np.random.Generator, missing: float = 0.03) -> np.ndarray:
    return np.where(rng.random(len(values)) < missing, np.nan, values).astype(np.float32)


def _draw_items(latent: _Latent, item_id: np.ndarray, rng: np.random.Generator) -> pd.DataFrame:
    n = len(item_id)
    department = _to_labels("department", latent.department, rng)
    offset = latent.item - latent.centre[latent.department]
    shelf = latent.department * 8 + (offset[:, :3] > 0) @ np.array([1, 2, 4])
    n_brands = max(8, n // 50)
    near = rng.poisson(2.0, n) + latent.department * n_brands // len(latent.centre)  # brands cluster by department
    brand = np.where(rng.random(n) < 0.7, near % n_brands, rng.choice(n_brands, n, p=_make_zipf_weights(n_brands, 2.0)))
    brand = _to_labels("brand", brand, rng)
    frame = pd.DataFrame(
        {
            "item_id": item_id,
            "title": [f"{place}, item {number}" for place, number in zip(department, item_id, strict=True)],
            "category": department,
            "provider": brand,
            "available": True,
            "department": department,
            "shelf": _to_labels("shelf", shelf, rng),
            "brand": brand,
            "colour": _to_labels("colour", rng.choice(12, n, p=_make_zipf_weights(12, 1.0)), rng, missing=0.05),
            "size": _to_labels("size", _to_bands(offset[:, 3] / 0.6, 6), rng, missing=0.02),
            "price": _drop_some(np.exp(2 + 0.5 * latent.item[:, 4] + 0.3 * rng.normal(size=n)), rng),
            "weight_kg": _drop_some(rng.gamma(2.0, 0.5, n), rng),
        }
    )
    return frame.sort_values("item_id", ignore_index=True)


def _draw_users(latent: _Latent, rng: np.random.Generator) -> pd.DataFrame:
    n = len(latent.user)
    blurred = latent.user + 0.5 * rng.normal(size=latent.user.shape)
    return pd.DataFrame(
        {
            "user_id": np.arange(1, n + 1),
            "segment": _to_labels("segment", np.argmax(blurred @ latent.centre.T, axis=1), rng),
            "age_band": _to_labels("age band", _to_bands(blurred[:, 0], 8), rng, missing=0.1),
            "plan": _to_labels("plan", _to_bands(blurred[:, 1], 5), rng),
            "region": _to_labels("region", rng.choice(50, n, p=_make_zipf_weights(50, 2.0)), rng, missing=0.02),
            "income": _drop_some(np.exp(10 + 0.4 * blurred[:, 2]), rng, missing=0.1),
            "tenure_days": _drop_some(rng.exponential(400.0, n), rng),
            "distance_km": _drop_some(np.abs(5 + 3 * blurred[:, 3]), rng),
        }
    )
