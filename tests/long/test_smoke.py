"""Every experiment on tiny data: it runs, and its figures are finite, have names of their own and can be kept.

What needs a tritonserver is run up to it: repositories are laid out, processes beside the server run, and figures are computed
from made-up measurements.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import cached_property
from io import StringIO

import numpy as np
import pandas as pd
import pytest
from rich.console import Console
from typer.testing import CliRunner

from experiments import (
    aggregations,
    cache,
    compression,
    drift,
    growth,
    guard,
    leave_one_out,
    live_kills,
    merlin,
    merlin_graph,
    off_policy,
    overhead,
    overhead_figures,
    precision,
    prequential,
    quality,
    scale,
    shop_decisions,
    tables_large,
    tables_lookups,
    tables_updates,
    tables_workload,
    two_generations,
)
from experiments.harness import Figure, Result, run_in_turns
from experiments.merlin_once import OnceExecutor
from experiments.shop_faults import CATALOGUE_FAULTS
from experiments.shop_world import World
from experiments.tables_feed import Published, run_broker, run_publisher
from export.__main__ import app
from export.build import build_repository
from export.settings import Settings
from perf.load.open_loop import Outcome
from perf.recall import measure_served_recall
from perf.tune.lab import measure_smaller_efforts
from repository.triton.config import LAYOUTS
from repository.triton.models import read_repository
from serving.contract.artifacts import find_stage_folder, verify_manifest
from serving.contract.generations import read_pinned_generation
from serving.contract.tensors import ENSEMBLE
from serving.stages.features import drift as served_drift
from serving.stages.rules.config import RulesConfig
from tests.repositories import copy_to_change
from tests.unit.small_shops import few_resamples, keep_few_columns
from training.dataset import load_dataset
from training.evaluation.baselines import GRIDS, evaluate
from training.evaluation.problem import make_problem
from training.features.aggregates import read_aggregations
from training.models.candidates.sequence import SequenceModel, SequenceShape
from training.models.rankers.train_ranker import RankerSettings
from training.models.student.distill import STUDENT

DATA = "synthetic:tiny"
SMALLER = "synthetic:users=40,items=30,events=250"  # of experiments that train by themselves
SETTINGS = {
    "pipeline": {"recorded_requests": 32, "candidates": 64},
    "ranker": {"compression": "none", "width": 16},  # as the rows of smoke_tables_updates
    "training": {"teachers": "one", "graph": "never"},
}
REPLAY = """#!/bin/sh
echo "$@" > {folder}/words.txt
sleep 2  # long enough to be sampled
cat {folder}/said.txt
"""  # a program that says what an export said
QUIET = Console(quiet=True)


class Context:
    """Shared by the experiments: data, a repository of its training part, and what its export said."""

    def __init__(self, folder) -> None:
        self.folder, self.rng = folder, np.random.default_rng(0)
        self.dataset = keep_few_columns(load_dataset(DATA))
        part, said = prequential.take_exported_part(self.dataset), StringIO()
        self.repo = folder / "repository"
        with few_resamples():
            build_repository(part, self.repo, Settings.model_validate(SETTINGS), Console(file=said))
        self.said = said.getvalue()

    @cached_property
    def work(self) -> compression.Workload:
        return compression.make_workload(keep_few_columns(load_dataset(SMALLER)), lambda _: None)


@pytest.fixture(scope="module")
def context(tmp_path_factory) -> Context:
    return Context(tmp_path_factory.mktemp("experiments"))


def smoke_growth(context: Context) -> list[Figure]:
    of_candidates = growth.measure_candidates(context.repo, (20, 30), 10, context.rng)
    return of_candidates + growth.measure_catalogues((300, 600), 10, context.rng, lambda _: None)


def smoke_drift(context: Context) -> list[Figure]:
    with pytest.MonkeyPatch.context() as patch, drift.open_watched(context.repo, context.dataset) as watched:
        for module in (drift, served_drift):
            patch.setattr(module, "WINDOW_ROWS", 2 * drift.NEW_ROWS)
        return drift.measure(watched, replays=1, shifts=1)


def smoke_guard(context: Context) -> list[Figure]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"LOOK": 1_000, "ANSWERS": 1_000, "BREAKS_AT": 2_000}.items():
            patch.setattr(guard, name, value)
        return guard.measure(1, 5_000, context.rng)


def smoke_overhead(context: Context) -> list[Figure]:
    """Every copy is laid out; the measurements are the same for all of them."""
    scratch = context.folder / "overhead"
    count = overhead.lay_out(context.repo, scratch, 20)
    copies = [layout + kind for kind in ("", overhead.UNBATCHED, overhead.EMPTY) for layout in LAYOUTS]
    assert {folder.name for folder in scratch.iterdir() if folder.is_dir()} == set(copies)
    assert not any(model.config.HasField("dynamic_batching") for model in read_repository(scratch / "ensemble-unbatched"))
    half = [f"half, {name}" for name in (*overhead_figures.AT_HALF, "errors")]
    parts = (*overhead_figures.PARTS, "p50", "rate", "rate, many", "server us", "models us", *half)
    in_process = {f"in process {name}": 1.0 for name in ("p50", "p50, paused", "rate", "rate, batches")}
    tasks = {copy: lambda copy=copy: {f"{copy} {part}": 2.0 for part in parts} for copy in copies}
    values = run_in_turns({"in process": lambda: in_process, **tasks}, rounds=2)
    recall = measure_served_recall(scratch / "fused")[1]
    return overhead_figures.make_figures(values, count, dict.fromkeys(LAYOUTS, 100.0), recall, compared=10)


def smoke_merlin(context: Context) -> list[Figure]:
    """The hardened graph answers as exported; the measurements are made up."""
    from merlin.dag.runtime import Runtime
    from merlin.table import TensorTable

    sides = merlin_graph.read_sides(context.dataset)
    parts = merlin_graph.Parts.make(context.folder / "parts", *sides, 15, context.rng)
    user = TensorTable({"user_id": context.dataset.users["user_id"].to_numpy()[:1]})
    exported = merlin_graph.new_ensemble(parts, nvtabular=True).transform(user, runtime=Runtime())
    for nvtabular in (True, False):
        hardened = merlin_graph.new_ensemble(parts, nvtabular).transform(user, runtime=Runtime(OnceExecutor()))
        np.testing.assert_array_equal(hardened["item_ids"].values, exported["item_ids"].values)
    values = {f"{name} {what}": [2.0, 4.0] for name in merlin.CLIENTS for what in ("p50", "rate")}
    return merlin.make_figures(values)


def smoke_cache(context: Context) -> list[Figure]:
    stretch, active_ids = cache.read_stretch(DATA, 200)
    return cache.measure_hit_rates(stretch) + cache.measure_warming(stretch, active_ids)


def smoke_compression(context: Context) -> list[Figure]:
    """Every value of the setting, trained for a moment."""
    work, folder = context.work, context.folder / "networks"
    folder.mkdir()
    taught, student = replace(RankerSettings(), epochs=1), replace(STUDENT, epochs=1)
    variants, ensemble = compression.make_variants(work, lambda _: None, folder, taught, student)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compression, "ROUNDS", 2)
        measure_latencies_us = compression.measure_latencies(variants, work)
    rows = [compression.measure_quality(variant, work, us) for variant, us in zip(variants, measure_latencies_us, strict=True)]
    assert rows[0].n_bytes > rows[1].n_bytes > rows[2].n_bytes
    return compression.make_figures(rows, compression.measure_ensemble(ensemble, work))


def smoke_precision(context: Context) -> list[Figure]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(precision, "RUNS", 2)
        return precision.measure(context.dataset, context.repo, QUIET)


def smoke_prequential(context: Context) -> list[Figure]:
    repo = copy_to_change(context.repo, context.folder / "prequential")  # which gets a live store
    return prequential.make_figures(prequential.measure(context.dataset, repo, most=50))


def smoke_aggregations(context: Context) -> list[Figure]:
    """All sets get the answers of one export; each declares what the models would learn from."""
    sets = {name: aggregations.declare(context.dataset, tables) for name, tables in aggregations.SETS.items()}
    learned = {name: len(read_aggregations(dataset)) for name, dataset in sets.items()}
    assert list(learned.values()) == [0, 3, 6, 7, 4]
    repo = copy_to_change(context.repo, context.folder / "aggregations")
    gains = aggregations.measure(context.dataset, repo, most=50)
    return aggregations.make_figures(dict.fromkeys(sets, gains))


def smoke_leave_one_out(context: Context) -> list[Figure]:
    dataset, parts = context.dataset, leave_one_out.Parts.of(context.dataset)
    n_items, log = len(dataset.items), leave_one_out.encode_log(dataset, parts)
    wanted = log[1][parts.test]
    served = np.searchsorted(dataset.items["item_id"], leave_one_out.ask_served(context.repo, dataset, parts))
    untaught = leave_one_out.ask_model(SequenceModel(n_items, SequenceShape(width=8)), log, parts.test, n_items)
    assert not (untaught == log[1][parts.validation][:, None]).any()  # what the user had is not asked for
    answers = {leave_one_out.SERVED: served, leave_one_out.SASREC: untaught}
    qualities = {name: [leave_one_out.Quality.of(positions, wanted, n_items)] for name, positions in answers.items()}
    measured = leave_one_out.Measured(context.folder / "leave-one-out.json")
    assert leave_one_out.list_baselines(20_001, 20_001) == ["popularity", "item-kNN"]  # EASE would invert a matrix of 3 GB
    for name in leave_one_out.list_baselines(len(parts.test), n_items):
        values = asdict(leave_one_out.measure_baseline(dataset, name))
        measured.take(name, values.copy)
        resumed = leave_one_out.Measured(measured.path).take(name, dict)
        assert resumed == values
        qualities[name] = [leave_one_out.Quality(**resumed)]
    return leave_one_out.make_figures("amazon-sports", qualities)


def smoke_scale(context: Context) -> list[Figure]:
    """Read again what an export said, from a program that takes the words of the command; latencies are made up."""
    folder = context.folder / "scale"
    folder.mkdir()
    (folder / "said.txt").write_text(context.said)
    (folder / "python").write_text(REPLAY.format(folder=folder))
    (folder / "python").chmod(0o755)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "executable", str(folder / "python"))
        figures = scale.measure_export(SMALLER, folder / "repository")
    assert {"memory at its peak: export", "phase sources", "phase rehearsal"} < {figure.name for figure in figures}
    module, *words = (folder / "words.txt").read_text().split()[1:]
    assert (module, CliRunner().invoke(app, [*words, "--help"]).exit_code) == ("export", 0)
    latencies_ms = {f"{name}: {what}": [2.0, 4.0] for name in ("large", "small") for what in ("p50", "p99")}
    return figures + scale.make_figures(latencies_ms, {name: {"tritonserver": 100.0} for name in ("large", "small")})


def smoke_quality(context: Context) -> list[Figure]:
    problem = make_problem(context.dataset)
    fit, _ = GRIDS["popularity"]
    popularity = evaluate(fit(problem.test.positives), problem.test)
    folder = find_stage_folder(context.repo, ENSEMBLE, read_pinned_generation(context.repo))
    sources = json.loads((folder / "manifest.json").read_text())["reports"]["sources"]
    better = replace(popularity, recall_at_20=2 * popularity.recall_at_20)
    runs = [{"popularity": popularity, "after rank": popularity, quality.SERVED: served} for served in (popularity, better)]
    figures = quality.make_figures(runs)
    (ratios,) = (figure.values for figure in figures if figure.name == f"{quality.SERVED} over the best baseline: Recall@20")
    assert ratios == pytest.approx([1.0, 2.0])
    assert quality.make_choice_figures({"sequence": {"weight": 0.0, "validation": {"0.0": 0.0}}}) == []  # of an older export
    return figures + quality.make_choice_figures(sources)


def smoke_tables(context: Context) -> list[Figure]:
    folder, rows, rng = context.folder / "tables", 20_000, context.rng
    return [
        *tables_lookups.measure_hits(folder, rows, (32,), tables_workload.EXPONENT, rng, keys=128),
        *tables_lookups.measure_misses(folder, rows, rng, n_requests=3),
        *tables_lookups.measure_growth(folder, [10_000, rows], rng, n_requests=4, rounds=1),
    ]


def smoke_tables_large(context: Context) -> list[Figure]:
    """The repository over the large table is sound; its table does not exist, because only a server would open it."""
    scratch, keys = context.folder / "large", np.zeros((2, 256), np.int32)
    tables_large.make_large_repository(context.repo, scratch, "no-table", 5_000_000, tables_workload.WAITS, keys)
    folder = find_stage_folder(scratch / "repository", "rank", read_pinned_generation(scratch / "repository"))
    verify_manifest(folder)
    assert (folder / "model.py").read_text() == tables_large.MODEL.read_text()
    return [
        Figure(name="share of RAM", values=[tables_workload.compute_ram_share(5_000_000, 0)], at_most=tables_workload.RAM_SHARE)
    ]


def smoke_tables_updates(context: Context) -> list[Figure]:
    """A broker and a publisher run; what the server would answer is made up."""
    keys, rows = {"item_0": np.arange(30_000)}, {"item_0": np.zeros((30_000, 16), np.float32)}
    with run_broker() as (brokers, _):
        tables_updates.make_live_repository(context.repo, context.folder / "live", brokers, context.folder / "state")
        published = Published(brokers, "smoke", keys, rows)
        with run_publisher(published):
            published.go.set()
            deadline_s = time.monotonic() + 30
            while not published.count.value and time.monotonic() < deadline_s:
                time.sleep(0.02)
            count = float(published.count.value)
    assert count > 0
    instants_ns = np.arange(100) * 1_000_000
    outcomes = {turn: [Outcome(instants_ns, instants_ns, instants_ns + 5_000_000)] for turn in tables_updates.TURNS}
    return tables_updates.make_figures(outcomes, [20.0, 30.0], [count])


def smoke_live_kills(context: Context) -> list[Figure]:
    """A few kills of processes; a server is killed in tests/server."""
    folder = context.folder / "killed.live"
    acknowledged = live_kills.kill_processes(folder, 2, 2, context.rng)
    found = live_kills.check_store(folder, acknowledged)
    assert not +found.wrong
    lost = live_kills.check_store(folder, {**acknowledged, 1: b"another event"}).wrong
    assert +lost == {"lost": 1}
    return live_kills.make_figures(found, len(acknowledged), {"writer": 2, "machine": 2, "server": 0})


def smoke_off_policy(context: Context) -> list[Figure]:
    """Two policies that show five items at three positions; each log estimates what the other policy really earned."""
    rates, folder, rng = np.array([0.1, 0.2, 0.3, 0.4, 0.5]), context.folder / "bandit", np.random.default_rng(0)
    for name, policy in (("random", np.full(5, 0.2)), ("bts", rates / rates.sum())):
        (folder / name).mkdir(parents=True)
        items = rng.choice(5, 6_000, p=policy)
        columns = {"item_id": items, "position": np.arange(6_000) % 3 + 1, "propensity_score": policy[items]}
        log = pd.DataFrame(columns | {"click": (rng.random(6_000) < rates[items]).astype(int)})
        log.to_csv(folder / name / "men.csv.gz", index=False)
    figures = off_policy.measure(folder, compare_with_obp=False)
    values = {figure.name: figure.values for figure in figures}
    for judged in ("random", "bts"):
        for estimator in ("IPS", "SNIPS", "DR"):
            low, _, high = values[f"{judged}, {estimator}: estimate"]
            assert low < values[f"{judged}, click rate as it was"][0] < high
    return figures


def smoke_simulated_shop(context: Context) -> list[Figure]:
    """The world alone: its log can be exported, its best lists are the best, and both ways to decide find the better ones."""
    world = World(60, 50, context.rng)
    dataset = world.write_log(context.folder / "simulated", 500, 10, 1_700_000_000)
    assert (len(dataset.interactions), len(dataset.items)) == (500, 50)
    rules = [RulesConfig.from_dict(fault(dataset)) for fault in CATALOGUE_FAULTS.values()]
    assert len(set(map(str, rules))) == len(rules) >= 3
    assert all(25 <= len(own.blocked_items) < 50 for own in rules)
    best = np.argsort(-world.takes, axis=1)[:, :10] + 1
    worst = np.argsort(world.takes, axis=1)[:, :10] + 1
    had = np.zeros(world.takes.shape, bool)
    assert (world.measure_quality(best, had), world.measure_quality(worst, had) < 0.2) == (pytest.approx(1.0), True)
    before = world.takes.copy()
    world.change_tastes(1.0)
    assert not np.isclose(before, world.takes).all(axis=1).any()
    lists = np.argsort(-world.takes, axis=1)[:, :10] + 1  # the best ones since the change
    alarms = shop_decisions.count_false_alarms(shop_decisions.compute_clicked(world, lists), 2, context.rng)
    return [alarms, *shop_decisions.compare_ways(world, "old tastes", best, lists, context.rng)]


SMOKE: dict[str, Callable[[Context], list[Figure]]] = {
    "cache": smoke_cache,
    "compression": smoke_compression,
    "drift": smoke_drift,
    "growth": smoke_growth,
    "guard": smoke_guard,
    "live_kills": smoke_live_kills,
    "merlin": smoke_merlin,
    "overhead": smoke_overhead,
    "precision": smoke_precision,
    "leave_one_out": smoke_leave_one_out,
    "aggregations": smoke_aggregations,
    "prequential": smoke_prequential,
    "quality": smoke_quality,
    "scale": smoke_scale,
    "off_policy": smoke_off_policy,
    "simulated_shop": smoke_simulated_shop,
    "tables": smoke_tables,
    "two_generations": lambda context: two_generations.make_figures(
        {f"{how}: {what}": [2.0, 4.0] for how in ("one", *two_generations.MODES) for what in ("p50", "p99", "memory")}
    ),
    "tables_large": smoke_tables_large,
    "tables_updates": smoke_tables_updates,
}


@pytest.mark.parametrize("name", SMOKE)
def test_an_experiment_measures_figures(name, context, tmp_path):
    figures = SMOKE[name](context)
    names = [figure.name for figure in figures]
    assert names
    assert len(set(names)) == len(names)
    assert all(np.isfinite(figure.values).all() for figure in figures)
    result = Result(name=name, title=name, command="", conditions="", figures=[figure.to_record() for figure in figures])
    result.write(tmp_path)
    assert Result.model_validate_json((tmp_path / f"{name}.json").read_text()) == result


def test_without_an_index_no_search_effort_is_tuned(context):
    assert measure_smaller_efforts(context.repo) == {}
