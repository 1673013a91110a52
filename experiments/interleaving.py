"""Count the requests that A/B and interleaving need to find the better of two generations, by how much the two differ.

    python -m experiments.interleaving [--users 800] [--items 600]

Users of a simulated shop (shop_world.py) click on lists of ten. The better generation ranks by their tastes with little noise.
The other one shows the same lists to most users, and a noisier ranking to the rest, as a fault for some of them does.
In an A/B test every click adds variance; in interleaving only clicks on items that one of the two lists lacks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import numpy as np
import typer

from experiments.harness import RESULTS, Figure, ResultsFolder, finish, read_machine
from experiments.shop_decisions import LEAST_SAVED, run_trials
from experiments.shop_world import World
from perf.command import run

LENGTH = 10
SHARES = (0.02, 0.05, 0.1, 0.2, 0.5, 1.0)  # of the users who are shown the worse ranking
BLUR, WORSE_BLUR = 0.08, 0.2  # standard deviations of the noise that is added to the chances by which items are ranked
MUCH_ALIKE = 0.95  # where both lists share so many of their items, interleaving must need LEAST_SAVED times fewer requests


def draw_lists(world: World, blur: float, rng: np.random.Generator) -> np.ndarray:
    """Return a list for each user, int64 [U, LENGTH]."""
    return (world.takes + blur * rng.normal(size=world.takes.shape)).argsort(axis=1)[:, ::-1][:, :LENGTH] + 1


def measure(
    world: World, shares: tuple[float, ...], trials: int, rng: np.random.Generator, say: Callable[[str], None]
) -> list[Figure]:
    good, worse, figures = draw_lists(world, BLUR, rng), draw_lists(world, WORSE_BLUR, rng), []
    for share in shares:
        say(f"{share:.0%} of the users are shown the worse ranking")
        partly_worse = np.where((rng.random(len(good)) < share)[:, None], worse, good)
        alike, _, by_ab, by_both, requests = run_trials(world, partly_worse, good, trials, rng)
        found = sum(sign == 1 for _, sign in by_ab + by_both)
        bound = {"at_least": LEAST_SAVED} if alike >= MUCH_ALIKE else {}
        name = f"{share:.0%} of the users"
        figures += [
            Figure(name=f"{name}: items that both lists show", values=[alike]),
            Figure(name=f"{name}: A/B requests", values=[requests[0]]),
            Figure(name=f"{name}: interleaved requests", values=[requests[1]]),
            Figure(name=f"{name}: A/B requests over interleaved ones", values=[requests[0] / requests[1]], **bound),
            Figure(name=f"{name}: found the better one, of {2 * trials}", values=[found], at_least=2 * trials),
        ]
    return figures


def main(
    users: Annotated[int, typer.Option(min=100)] = 800,
    items: Annotated[int, typer.Option(min=100)] = 600,
    trials: Annotated[int, typer.Option(min=1, help="of each way")] = 10,
    results: ResultsFolder = RESULTS,
) -> None:
    """Count the requests that A/B and interleaving need. Exit code 1 when a bound is missed."""
    machine, rng = read_machine(), np.random.default_rng(0)
    figures = measure(World(users, items, rng), SHARES, trials, rng, lambda message: typer.echo(message, err=True))
    conditions = f"{users:,} users, {items:,} items, medians of {trials} tests of each way"
    command = f"python -m experiments.interleaving --users {users} --items {items} --trials {trials}"
    finish("interleaving", "Interleaving beside A/B", command, conditions, figures, results, machine)


if __name__ == "__main__":
    run(main, "python -m experiments.interleaving")
