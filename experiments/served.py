"""A tritonserver with its gateway on free ports, for experiments that speak REST."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil

from export.relayout import relayout
from perf.tune.variant import seal_again
from repository.applied_rules import compile_for_generation, read_catalogue
from server import processes, watch
from server.control import stop_server
from server.helpers import gateway
from server.launcher import TritonServer
from server.start.environment import MEASURED_DIR
from server.start.ports import find_free_port
from server.state import ServerState, make_state_path, read_state
from serving.contract.artifacts import find_stage_folder, read_json
from serving.contract.generations import read_pinned_generation
from serving.stages.rules.config import CONFIG_FILE

SETTINGS = "requests_per_s = 1_000_000\nburst = 1_000_000\n"


@dataclass
class Served:
    repo: Path
    run_dir: Path
    grpc_port: int
    port: int  # of the gateway

    @property
    def state(self) -> ServerState:
        state = read_state(make_state_path(self.run_dir, self.grpc_port))
        assert state is not None
        return state

    @property
    def grpc_url(self) -> str:
        return f"localhost:{self.grpc_port}"

    def measure_rss_mb(self) -> float:
        """Return the memory of all processes of the server and its gateway, in MB."""
        total = 0
        for process in processes.find_members(self.state.tag):
            try:
                total += process.memory_info().rss
            except psutil.NoSuchProcess:
                continue
        return total / 1e6

    def find_stub(self, model: str) -> psutil.Process:
        """Return the process of a Python model's instance."""
        members = processes.find_server_members(self.state.tag)
        return next(process for process in members if f"/{model}/" in " ".join(process.cmdline()))

    def find_gateway_processes(self) -> list[psutil.Process]:
        """Return the gateway alone, without its supervisor."""
        return [p for p in gateway.list_gateways(self.state.tag) if "server.supervisor" not in p.cmdline()]

    def draw_user_ids(self, count: int, rng: np.random.Generator) -> list[int]:
        """Return random users that the repository knows."""
        folder = find_stage_folder(self.repo, "preprocess", read_pinned_generation(self.repo))
        known = np.load(folder / "store" / "user_ids.npy", mmap_mode="r")
        return rng.choice(np.asarray(known), count).tolist()


def publish_with_half(repo: Path, copy: Path, scratch: Path) -> None:
    """Publish the models of a repository as two generations of a new one, of which the second blocks every second item.

    So their lists differ, and an answer that mixes both is seen. scratch: folder for the changed models
    """
    generation, other = read_pinned_generation(repo), scratch / "half"
    shutil.copytree(repo, other, symlinks=True)
    rerank, catalogue = find_stage_folder(other, "rerank", generation), read_catalogue(other, generation)
    items = list(catalogue["item_names"] or catalogue["item_ids"].tolist())
    rules = read_json(rerank, CONFIG_FILE) | {"blocked_items": items[::2]}
    compile_for_generation(other, scratch / "rules", generation, rules)
    [compiled] = (scratch / "rules").iterdir()
    for path in compiled.iterdir():
        (rerank / path.name).unlink()  # it is read-only
        shutil.move(path, rerank / path.name)
    seal_again(other, generation, "rerank")
    for source in (repo, other):
        relayout(source, copy, "ensemble")


def publish_twice(repo: Path, copy: Path) -> None:
    """Publish the models of a repository as two generations of a new one."""
    for _ in range(2):
        relayout(repo, copy, "ensemble")


@contextmanager
def serve_with_gateway(
    repo: Path, settings: str = "", supervised: bool = False, run_dir: Path = MEASURED_DIR
) -> Iterator[Served]:
    """Serve a repository. settings: more lines of the gateway's TOML; run_dir: RUN_DIR, if publications shall know of it"""
    port = find_free_port()
    config = run_dir / f"gateway-{port}.toml"
    config.parent.mkdir(parents=True, exist_ok=True)
    config.write_text(SETTINGS + settings)
    server = TritonServer(repo, run_dir=run_dir).start()
    assert server.state is not None
    state = server.state
    try:
        state = gateway.follow(state, port, str(config), run_dir)
        if supervised:
            watch.start_supervisor(state, run_dir)
        yield Served(repo.resolve(), run_dir, state.ports.grpc, port)
    finally:
        stop_server(state, run_dir)
        config.unlink(missing_ok=True)
