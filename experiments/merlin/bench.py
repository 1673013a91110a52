"""Every variant of the baseline and both layouts of ours, served side by side and asked in turns: the others are stopped.

The machine's speed drifts, so a ratio is taken within a round, and the median over the rounds counts.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from pydantic import BaseModel

from experiments.merlin.export import MODEL, VARIANTS
from perf.answers import differing_answers as unlike_in_process
from perf.figure import Ratio
from perf.load import analyzer
from perf.load.workload import Arrays, ask, write_analyzer_json
from perf.observe.memory import read_memory, total_mib
from perf.target import own_server, site_of
from perf.turns import Turns, taking_turns
from repository.recorded import compare_answers
from server.health import local_client
from server.state import ServerState
from serving.contract.tensors import ENSEMBLE, ModelSpec, TensorSpec

ENSEMBLE_LAYOUT, FUSED_LAYOUT = "ours, ensemble", "ours, fused"
OURS = (ENSEMBLE_LAYOUT, FUSED_LAYOUT)
AS_EXPORTED, HARDENED, HARDENED_TWICE, BEST = (variant.name for variant in VARIANTS)
SLOW = (AS_EXPORTED, HARDENED, HARDENED_TWICE)
# Numbers of clients. An instance of the baseline takes one request at a time: twice as many clients keep it busy.
LEVELS = {AS_EXPORTED: (2,), HARDENED: (2,), HARDENED_TWICE: (4,), BEST: (2, 4, 8)}
LEVELS |= dict.fromkeys(OURS, (16, 32, 64, 128))  # of PEAK_CLIENTS those that were the best one in any run
COMPARED_USERS = 16
SLOW_WINDOW_S = 4.0  # of perf_analyzer: a variant that answers four requests a second needs a longer look


@dataclass(frozen=True)
class Contender:
    """One server under measurement. levels: numbers of clients among which the one with the most answers/s is looked for."""

    name: str
    state: ServerState
    turns: Turns
    spec: ModelSpec
    input_data: Path  # of perf_analyzer: the same users for all
    levels: tuple[int, ...]
    window_s: float

    def measure(self, clients: int) -> tuple[float, float]:
        """-> (p50 ms, answers/s) with that many clients."""
        http = f"localhost:{self.state.ports.http}"
        target = analyzer.Target(self.spec.name, self.state.grpc_url, http, self.input_data)
        with self.turns.turn():
            level = analyzer.measure(target, "concurrency", clients, self.window_s, self.input_data.with_name("raw.npz"))
        return level.latency.p50_ms, level.achieved_rate


class Rounds(BaseModel):
    """What one contender reached: p50 with one client and answers/s with the best number of clients, a value per round."""

    clients: int
    p50_ms: list[float] = []
    rate: list[float] = []
    memory_mib: float = 0.0  # of all its processes, shared pages once


@dataclass(frozen=True)
class Bound:
    """ours must be this many times faster than `baseline`: p50 with one client, answers/s at best. 1 = no slower."""

    ours: str
    baseline: str
    p50: float
    rate: float


BOUNDS = tuple(
    Bound(ours, baseline, p50, rate)
    for ours, best_rate in ((ENSEMBLE_LAYOUT, 1.8), (FUSED_LAYOUT, 3.0))
    for baseline, p50, rate in ((AS_EXPORTED, 80, 250), (HARDENED, 25, 50), (HARDENED_TWICE, 25, 50), (BEST, 1, best_rate))
)


@dataclass
class Result:
    rounds: dict[str, Rounds] = field(default_factory=dict)
    answers: str = ""  # "" when the variants answer alike, and ours as in process, else what differs

    def ratio(self, ours: str, baseline: str, metric: str) -> Ratio:
        """How many times faster ours is, by round. metric: "p50_ms" or "rate"."""
        a, b = getattr(self.rounds[ours], metric), getattr(self.rounds[baseline], metric)
        return Ratio(metric=metric, a=a, b=b) if metric == "p50_ms" else Ratio(metric=metric, a=b, b=a)


@contextlib.contextmanager
def contenders(
    repositories: dict[str, Path], ours: ModelSpec, user_ids: np.ndarray, window_s: float
) -> Iterator[list[Contender]]:
    """Serve all of them. repositories: by the names of OURS and VARIANTS; ours: the spec of our `recommend`.

    user_ids: int64 [N, 1], who is asked for
    """
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="perf-")))
        served = []
        for name, repository in repositories.items():
            state = stack.enter_context(own_server(repository)).state
            spec = ours if name in OURS else baseline_spec()
            input_data = folder / f"{spec.name}.json"
            write_analyzer_json(input_data, spec, requests_of(spec, user_ids))
            window = max(window_s, SLOW_WINDOW_S) if name in SLOW else window_s
            turns = stack.enter_context(taking_turns(state.tag))
            served.append(Contender(name, state, turns, spec, input_data, LEVELS[name], window))
        yield served


def requests_of(spec: ModelSpec, user_ids: np.ndarray) -> Arrays:
    """-> a request per user, [N, …]: nothing is said but the id, and every tensor is sent, as our clients do."""
    return {tensor.name: tensor.filled(len(user_ids)) for tensor in spec.inputs if tensor.optional} | {"user_id": user_ids}


def baseline_spec() -> ModelSpec:
    """What an exported ensemble takes and gives; one user per request (max_batch_size 0)."""
    outputs = (TensorSpec("item_ids", "INT64", (-1,)), TensorSpec("scores", "FP32", (-1,)))
    return ModelSpec(MODEL, (TensorSpec("user_id", "INT64", (1,)),), outputs)


def measure_all(
    served: list[Contender],
    user_ids: np.ndarray,
    rounds: int,
    step: Callable[[str], None],
    saved: Callable[[Result], object],
) -> Result:
    """user_ids: int64 [N, 1], whose answers are compared first. Who goes first changes with every round.

    `saved` is called after each round: a run that is stopped halfway has not been for nothing.
    """
    result = Result(answers=differing_answers(served, user_ids[:COMPARED_USERS]))
    for contender in served:
        step(f"{contender.name}: how many clients")
        result.rounds[contender.name] = Rounds(clients=best_clients(contender))
    for number in range(rounds):
        for contender in served[number % len(served) :] + served[: number % len(served)]:
            step(f"round {number + 1}: {contender.name}")
            taken = result.rounds[contender.name]
            taken.p50_ms.append(contender.measure(1)[0])
            taken.rate.append(contender.measure(taken.clients)[1])
        for contender in served:
            result.rounds[contender.name].memory_mib = total_mib(read_memory(contender.state.tag))
        saved(result)
    return result


def best_clients(contender: Contender) -> int:
    """The level with the most answers/s; nothing is measured where there is but one."""
    if len(contender.levels) == 1:
        return contender.levels[0]
    return max(contender.levels, key=lambda clients: contender.measure(clients)[1])


def differing_answers(served: list[Contender], user_ids: np.ndarray) -> str:
    """-> "" when all variants of the baseline give the same items and scores, and both of our layouts those of this process.

    Ours are asked for the baseline's users too: recorded requests say more than an id, these say nothing else.
    """
    answers = {contender.name: _answers(contender, user_ids) for contender in served}
    found = []
    for group in (OURS, tuple(variant.name for variant in VARIANTS)):
        first, *others = [name for name in group if name in answers]
        differences = {name: compare_answers(answers[name], answers[first]) for name in others}
        found += [f"{name} against {first}: {difference}" for name, difference in differences.items() if difference]
    alone = [_unlike_in_process(contender) for contender in served if contender.name in OURS]
    found += [f"ours against in process, {difference}" for difference in alone if difference]
    return "; ".join(found)


def _unlike_in_process(contender: Contender) -> str:
    with contender.turns.turn():
        return unlike_in_process(site_of(contender.state), contender.spec)


def _answers(contender: Contender, user_ids: np.ndarray) -> Arrays:
    """-> the contender's outputs to these users, [N, …]."""
    with contender.turns.turn(), local_client(contender.state.grpc_url) as client:
        if contender.spec.name == ENSEMBLE:
            return ask(client, contender.spec, "", requests_of(contender.spec, user_ids))
        one_by_one = [ask(client, contender.spec, "", {"user_id": user_id}) for user_id in user_ids]
        return {name: np.concatenate([answer[name] for answer in one_by_one]) for name in one_by_one[0]}
