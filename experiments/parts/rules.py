"""What the rules cost: one request and a full batch, each rule alone and all together.

    python -m experiments.parts.rules [--candidates 100] [--returned 20]

The limit is for one request with every rule on; exit code 1 when it is missed. The last line is one line of JSON.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from perf.command import BROKEN, run
from perf.report.results import last_line
from repository.rules import compile_rules
from serving.stages.rules.config import Exploration, Pin, ProviderFloor, RulesConfig
from serving.stages.rules.rules import Rules

N_ITEMS = 20_000
LIMIT_US = 200.0

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

RULES = {
    "diversity": {"diversity": 0.3},
    "exploration": {"exploration": Exploration(slots=3, pool=20)},
    "caps": {"max_per_category": 3, "max_per_provider": 4, "price_cap": 30.0},
    "provider_floor": {"provider_floor": ProviderFloor(("provider 7", "provider 8"), 0.2)},
    "pinned": {"pinned": tuple(Pin(item_id, slot) for slot, item_id in enumerate(range(0, 3000, 1000)))},
    "blocked_items": {"blocked_items": tuple(range(5, 500, 5))},
}
CONFIGS = {"none": {}, **RULES, "all": {name: value for rule in RULES.values() for name, value in rule.items()}}


def compiled(settings: dict, items_returned: int, rng: np.random.Generator) -> Rules:
    with tempfile.TemporaryDirectory() as folder:
        compile_rules(
            Path(folder),
            RulesConfig(**settings),
            item_ids=np.arange(N_ITEMS),
            category=[f"category {code}" for code in rng.zipf(1.5, N_ITEMS) % 40],
            provider=[f"provider {code}" for code in rng.zipf(1.3, N_ITEMS) % 60],
            price=rng.gamma(2.0, 8.0, N_ITEMS).astype(np.float32),
            popularity=rng.zipf(1.2, N_ITEMS),
            items_returned=items_returned,
        )
        return Rules.load(Path(folder))


def measure_us(
    rules: Rules, batch: int, n_candidates: int, k: int, rng: np.random.Generator, n_requests: int, repeats: int = 9
) -> tuple[float, float]:
    """-> (cost, first): medians over requests of the fastest of `repeats` calls, and of the first call.

    Other work on the machine only ever adds time, so the fastest call is what the rules cost; the first is what a busy
    machine with cold caches makes of it. Every request has other candidates, the first pinned item among them.
    """
    elapsed_ns = np.empty((n_requests, repeats))
    for row in elapsed_ns:
        position = np.stack([rng.choice(N_ITEMS - 1, n_candidates, replace=False) + 1 for _ in range(batch)])
        position[:, n_candidates // 2] = 0
        scores, user_id = rng.normal(size=position.shape).astype(np.float32), rng.integers(0, 2**40, batch)
        for repeat in range(repeats):
            start = time.perf_counter_ns()
            rules.apply(position, scores, user_id, k)
            row[repeat] = time.perf_counter_ns() - start
    return float(np.median(elapsed_ns.min(axis=1))) / 1e3, float(np.median(elapsed_ns[:, 0])) / 1e3


@app.command()
def main(
    candidates: Annotated[int, typer.Option(help="M, candidates per request", min=2)] = 100,
    returned: Annotated[int, typer.Option(help="K, items served", min=1)] = 20,
) -> None:
    """What the rules cost a request and a full batch, each alone and all together. Exit code 1 when the limit is missed."""
    print(f"rules over M={candidates} candidates, K={returned} served; microseconds per call")
    print(f"{'rules on':<16}{'1 request':>10}{'first run':>11}{'batch of 64':>13}{'per request':>13}")
    result = {}
    for name, settings in CONFIGS.items():
        rng = np.random.default_rng(0)
        rules = compiled(settings, returned, rng)
        one, first = measure_us(rules, 1, candidates, returned, rng, n_requests=300)
        many, _ = measure_us(rules, 64, candidates, returned, rng, n_requests=15)
        result[name] = {"batch_1_us": round(one, 1), "batch_1_first_us": round(first, 1), "batch_64_us": round(many, 1)}
        print(f"{name:<16}{one:>10.1f}{first:>11.1f}{many:>13.1f}{many / 64:>13.1f}")
    met = result["all"]["batch_1_us"] < LIMIT_US
    print(f"one request, all rules: {result['all']['batch_1_us']} us, limit {LIMIT_US:.0f} us: {'met' if met else 'MISSED'}")
    print(last_line({"perf": "rules", "limit_us": LIMIT_US, "met": met, **result}))
    if not met:
        raise typer.Exit(BROKEN)


if __name__ == "__main__":
    run(app, "python -m experiments.parts.rules")
