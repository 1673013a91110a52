"""Inputs of commands that need no server: a finished run, and a small catalogue with an index."""

from pathlib import Path

import numpy as np
import pytest

from perf.observe import Latency, ProcessMemory, StageTimes
from perf.report.results import Closed, Machine, Open, Run, Yardstick
from serving.contract.tensors import STAGES, Axes
from training.retrieval.index import Choice, Sizes, choose_index

AXES = Axes(candidates=20, history=3, exclusions=2, items_returned=2, user_categorical=2, user_continuous=1)
N_ITEMS, WIDTH = 3_000, 8


def stage_times(scale: float) -> StageTimes:
    return StageTimes(
        requests=100,
        failed=0,
        queue_us=100 * scale,
        compute_input_us=20,
        compute_infer_us=400 * scale,
        compute_output_us=30,
        calls_by_batch={1: 20, 4: 20},
    )


STAGE_TIMES = {stage: stage_times(1.0) for stage in STAGES}


def closed_levels(rng: np.random.Generator) -> list[Closed]:
    closed = []
    for model, transport, mode, values in (
        ("recommend", "grpc", "concurrency", (1, 8)),
        ("recommend", "http", "concurrency", (8,)),
        ("rank", "grpc", "concurrency", (1, 8)),
    ):
        for value in values:
            latency = Latency.of(rng.integers(2_000_000, 9_000_000, 300) * value)
            closed.append(
                Closed(
                    model=model,
                    transport=transport,
                    mode=mode,
                    value=value,
                    achieved_rate=100.0 * value**0.5,
                    spread=0.1,
                    latency=latency,
                    stages=STAGE_TIMES,
                    raw="x.npz",
                )
            )
    return closed


def open_loads(rng: np.random.Generator, folder: Path) -> list[Open]:
    """Their raw files go into the folder."""
    loads = []
    for name in ("poisson 25 %", "poisson 50 %", "volleys of 8", "bursts x10"):
        due_ns = np.sort(rng.integers(0, 10**10, 400))
        answered_ns = due_ns + rng.integers(3_000_000, 30_000_000, 400)
        answered_ns[:2] = -1
        raw = f"{name.split()[0]}.npz"
        np.savez(folder / raw, **{"due_ns": due_ns, "sent_ns": due_ns, "answered_ns": answered_ns, "in a burst": due_ns > 5e9})
        latency = Latency.of((answered_ns - due_ns)[2:])
        loads.append(
            Open(
                name=name,
                offered_rate=40.0,
                achieved_rate=39.8,
                duration_s=10.0,
                latency=latency,
                by_class={"in a burst": latency} if "bursts" in name else {},
                errors={"UNAVAILABLE: no": 2},
                error_share=0.005,
                unsent=0,
                send_late=latency,
                generator_cores=0.1,
                stages=STAGE_TIMES,
                raw=raw,
            )
        )
    return loads


@pytest.fixture
def run(tmp_path) -> Run:
    """A run with one of everything; raw files lie in tmp_path."""
    rng = np.random.default_rng(0)
    return Run(
        started="2026-01-01T00:00:00+00:00",
        label="a <label>",
        url="localhost:1",
        repo="repo",
        generation=7,
        commit="abc1234",
        config_hash="0123456789ab",
        layout="ensemble",
        machine=Machine(cpu="a CPU", cores=2, load_before=3.0, kernel="6", python="3.11"),
        floor_p50_ms=0.4,
        closed=closed_levels(rng),
        open=open_loads(rng, tmp_path),
        yardstick=Yardstick(
            in_process_p50_ms=[1.0, 2.0, 1.5],
            served_p50_ms=[3.0, 5.0, 3.0],
            in_process_rate=[1000, 2000, 1000],
            served_rate=[500, 600, 700],
        ),
        memory=[ProcessMemory(name="tritonserver", pid=1, pss_mib=100, rss_mib=150)],
        hit_rates={"tables, l1": 0.9, "tables, l2": 0.5, "cache model=rank": 0.25},
    )


@pytest.fixture(scope="session")
def vectors() -> np.ndarray:
    rng = np.random.default_rng(0)
    centres = rng.normal(size=(30, WIDTH))
    return (centres[rng.integers(0, 30, N_ITEMS)] + 0.3 * rng.normal(size=(N_ITEMS, WIDTH))).astype(np.float32)


@pytest.fixture(scope="session")
def choice(vectors) -> Choice:
    return choose_index(vectors, np.arange(N_ITEMS), vectors[:64], AXES.candidates, sizes=Sizes(exact_up_to=100))
