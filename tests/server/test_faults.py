"""Remove or fill shared memory, and take processor time away: shoppers get answers meanwhile, and the server recovers."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from server import watch
from server.environment import PROJECT
from server.ports import find_free_port
from server.processes import SHM_DIR, find_members, find_server_members
from server.state import ServerState, read_known_servers
from serving.tables.store.memory import ARENA_PREFIX
from tests.repositories import copy_small_repository
from tests.server.gateways import USER
from tests.server.supervised import Supervised, stopped_after

CGROUP = Path("/sys/fs/cgroup")
PERIOD_US = 100_000
SHARE = 0.1  # of one core
THROTTLED_S = 8.0
SHM_MIB = 256


STARTS = """
import sys
from pathlib import Path
from server import gateway, watch
from server.launcher import TritonServer
repo, run_dir, port = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
state = gateway.follow(TritonServer(repo, run_dir=run_dir).start().state, port, "", run_dir)
watch.start_supervisor(state, run_dir)
"""


@pytest.fixture(scope="module")
def shop(tmp_path_factory) -> Iterator[Supervised]:
    """Yield a running shop. If this user may make a mount namespace, the shop runs in its own, whose /dev/shm has SHM_MIB."""
    folder = tmp_path_factory.mktemp("faults")
    repo, run_dir, port = copy_small_repository(folder / "repository"), folder / "run", find_free_port()
    command = [sys.executable, "-c", STARTS, str(repo), str(run_dir), str(port)]
    if subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode == 0:
        mount = f"mount -t tmpfs -o size={SHM_MIB}m tmpfs {SHM_DIR} && exec"
        command = ["unshare", "--mount", "--propagation", "private", "sh", "-c", f'{mount} "$@"', "sh", *command]
    subprocess.run(command, cwd=PROJECT, check=True, timeout=300)
    (state,) = read_known_servers(run_dir)
    with stopped_after(state, repo, run_dir, port) as shop:
        yield shop


def lists_of(shop: Supervised, users: range = range(1, 9)) -> dict[int, list]:
    """Return the list of each user. Fails if a fallback gave an answer."""
    lists = {}
    for user in users:
        params = {"user": user, "k": 5}
        answer = shop.http.get("/v1/recommendations", params=params, headers={"x-deadline-ms": "5000"}).json()
        assert answer["degraded"] == [], answer
        lists[user] = [item["id"] for item in answer["items"]]
    return lists


@contextmanager
def throttled(state: ServerState) -> Iterator[None]:
    """Limit all processes of tritonserver together to SHARE of one core, with a control group of version 1 or 2."""
    parent = CGROUP / "cpu" if (CGROUP / "cpu").is_dir() else CGROUP
    group = parent / f"throttled-{os.getpid()}"
    try:
        group.mkdir()
        if (group / "cpu.max").exists():
            (group / "cpu.max").write_text(f"{int(SHARE * PERIOD_US)} {PERIOD_US}")
        else:
            (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
            (group / "cpu.cfs_quota_us").write_text(str(int(SHARE * PERIOD_US)))
    except OSError as error:
        pytest.skip(f"this user may make no control group that limits processors: {error}")
    try:
        for process in find_server_members(state.tag):
            (group / "cgroup.procs").write_text(str(process.pid))
        yield
    finally:
        for pid in (group / "cgroup.procs").read_text().split():
            (parent / "cgroup.procs").write_text(pid)
        group.rmdir()


def test_a_server_with_a_tenth_of_a_core_is_slow_but_never_wrong_and_is_left_alone(shop):
    before, state, seen = lists_of(shop), shop.state, Counter()
    with throttled(state):
        until_s = time.monotonic() + THROTTLED_S
        while time.monotonic() < until_s:
            for user, items in before.items():
                answer = shop.http.get("/v1/recommendations", params={"user": user, "k": 5})
                assert answer.status_code == 200
                seen[tuple(answer.json()["degraded"])] += 1
                assert answer.json()["degraded"] == ["gateway_fallback"] or [i["id"] for i in answer.json()["items"]] == items
    assert seen.total() >= len(before)
    shop.recover()
    assert shop.state.pid == state.pid, watch.read_last_lines(shop.run_dir, shop.grpc_port, 20)
    assert lists_of(shop) == before


def fill(path: Path) -> None:
    """Write to a file until its file system is full. Raises OSError then."""
    with path.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(1 << 16))


def opened_rows(state: ServerState) -> set[str]:
    """Return the names of the shared-memory files of embedding rows that the server's processes have mapped."""
    maps = [Path(f"/proc/{process.pid}/maps").read_text() for process in find_server_members(state.tag)]
    paths = {line.split()[-1] for text in maps for line in text.splitlines() if f"{SHM_DIR}/{ARENA_PREFIX}" in line}
    return {Path(path).name for path in paths}


def test_shared_memory_whose_files_are_removed_changes_no_answer_and_is_made_anew_once_there_is_room(shop):
    """While shared memory is full, a killed stage cannot start again, and shoppers get popular items."""
    before, state = lists_of(shop), shop.state
    supervisor = next(process for process in find_members(state.tag) if "server.watch" in process.cmdline())
    folder = Path(f"/proc/{supervisor.pid}/root{SHM_DIR}")  # /dev/shm of the server's namespace
    files = [*folder.glob(f"{state.tag}*"), *(path for path in map(folder.joinpath, opened_rows(state)) if path.exists())]
    assert len(files) >= len(find_server_members(state.tag)) - 1  # at least one region of every stub
    for path in files:
        path.unlink()
    assert lists_of(shop) == before  # processes keep what they have mapped
    assert shop.is_ready()
    assert shop.state.pid == state.pid
    is_namespace_of_its_own = not folder.samefile(SHM_DIR)
    if is_namespace_of_its_own:
        with pytest.raises(OSError, match="No space left"):
            fill(folder / "filler")
    shop.stub("observe").kill()  # makes the supervisor restart the server, which needs shared memory
    if is_namespace_of_its_own:
        shop.wait(lambda: any("restart failed" in line for line in watch.read_last_lines(shop.run_dir, shop.grpc_port, 50)))
        assert not shop.is_ready()
        assert shop.ask()["degraded"] == ["gateway_fallback"]
        (folder / "filler").unlink()
    shop.wait(lambda: shop.state.pid != state.pid)
    shop.recover()
    assert lists_of(shop) == before
    event = {"user": USER, "item": before[USER][-1]}
    assert shop.http.post("/v1/events", json=event).status_code == 200
