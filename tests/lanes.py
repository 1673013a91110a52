"""Run every lane, the computing ones beside the server's, and give the verdict over all: `python -m tests.lanes`.

The server lane mostly waits, the others compute: two runs of pytest at once, the second of which leaves the processor to the
first. Lanes that compute share one, because importing takes each worker ten seconds. A run writes .run/lanes/RUN.log, which is
printed when it ends, and RUN.xml, from which its lanes are counted. Only the gpu lane may skip all of its tests. Whoever reads
only the last line must see the total of all lanes: it is in pytest's own form.

Where there is room, tests keep their files in memory: some hundred thousand, most of them copies of published code, which some
disks take minutes to create and to remove. The files of a run that failed or was killed stay until the next one begins.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree
from zlib import crc32

import psutil

LANES = ("unit", "long", "contract", "server", "gpu")
RUNS = {"server": 0, "unit+long+contract+gpu": 10}  # lanes of a run, how far it stands back (nice)
WORKERS = ["--numprocesses", str(1 + (os.cpu_count() or 1))]  # more than cores, because some tests wait
PROJECT = Path(__file__).parents[1]
LANES_DIR = PROJECT / ".run" / "lanes"
SHARED_MEMORY = Path("/dev/shm")
ROOM_BYTES = 12 << 30  # what the processes of all lanes take together with their files, twice over
TAGS = {"failure": "failed", "error": "error", "skipped": "skipped"}  # of RUN.xml; a test without any of them passed
TESTS_FAILED, NO_TESTS = 1, 5  # exit codes of pytest
OUTCOMES = ("failed", "passed", "skipped", "error")  # in the order in which pytest names them


@dataclass
class Lane:
    """counts: tests by outcome; seconds: of its tests, added up over the workers; remark: why the lane failed although no test
    did, or may have run none.
    """

    name: str
    counts: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    remark: str = ""

    @property
    def failed(self) -> int:
        return self.counts["failed"] + self.counts["error"]

    @property
    def ran(self) -> int:
        return self.counts["failed"] + self.counts["passed"]

    def add(self, case: ElementTree.Element) -> None:
        """Count a test of RUN.xml, or a file that cannot be imported."""
        self.counts.update([TAGS[child.tag] for child in case if child.tag in TAGS] or ["passed"])
        self.seconds += float(case.get("time", 0))

    def fail(self, reason: str) -> None:
        """Count an error where no test accounts for the failure: the total must show it."""
        self.counts["error"] += not self.failed
        self.remark = f"FAILED: {reason}"

    def __str__(self) -> str:
        counted = f"ran {self.ran:4d}  failed {self.failed:3d}  skipped {self.counts['skipped']:3d}  {self.seconds:4.0f} s"
        return f"lane {self.name:8s} {counted}  {self.remark}".rstrip()


def read_lanes(run: str, exit_code: int | None, folder: Path = LANES_DIR) -> list[Lane]:
    """Return the lanes of a run from its RUN.xml. exit_code: of pytest, None if it could not be started"""
    lanes = [Lane(name) for name in run.split("+")]
    try:
        cases = list(ElementTree.parse(folder / f"{run}.xml").iter("testcase"))
    except (OSError, ElementTree.ParseError):  # it crashed, or could not write
        exit_code, cases = None, []
    for lane in lanes:
        for case in cases:
            if (case.get("classname") or case.get("name") or "").startswith(f"tests.{lane.name}."):
                lane.add(case)
    is_explained = exit_code in (0, NO_TESTS) or (exit_code == TESTS_FAILED and any(lane.failed for lane in lanes))
    for lane in lanes:
        if exit_code is None:
            lane.fail("it ended without a result")
        elif not is_explained:
            lane.fail(f"pytest ended with exit code {exit_code}")
        elif lane.name == "gpu" and not lane.ran and not lane.failed:
            lane.remark = "(needs a GPU: each skip states its reason)" if lane.counts["skipped"] else "(it holds no test yet)"
        elif not lane.ran:
            lane.fail("no test ran")
    return lanes


def total(lanes: list[Lane], seconds: float) -> str:
    """`1387 passed, 3 skipped in 290.12s`"""
    counts = sum((lane.counts for lane in lanes), Counter())
    named = [f"{counts[o]} {'errors' if o == 'error' and counts[o] > 1 else o}" for o in OUTCOMES if counts[o]]
    return f"{', '.join(named) or 'no tests ran'} in {seconds:.2f}s"


def run_lanes(pytest: list[str], run: str, niceness: int, printing: threading.Lock, exit_codes: dict[str, int]) -> None:
    """Do one run, and keep its exit code. A file that cannot be imported stops no other."""
    folders = [f"tests/{lane}" for lane in run.split("+")]
    own = [*WORKERS, "--continue-on-collection-errors", "--junitxml", str(LANES_DIR / f"{run}.xml")]
    output = LANES_DIR / f"{run}.log"
    command = ["nice", f"-n{niceness}", *pytest, *own, *folders]
    with output.open("w") as file:
        exit_codes[run] = subprocess.run(command, cwd=PROJECT, stdout=file, stderr=subprocess.STDOUT).returncode
    with printing:
        print(f"\n--- {run}\n{output.read_text(errors='replace')}", flush=True)


def compile_tests(pytest: list[str]) -> None:
    """Import all tests of a new checkout once, which each of the workers would compile. What is wrong is told by the runs."""
    if not list(PROJECT.glob("tests/__pycache__/*pytest*.pyc")):
        command = [*pytest, "--collect-only", "--numprocesses", "0", "tests"]
        subprocess.run(command, cwd=PROJECT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)


def choose_folder() -> Path | None:
    """Return an empty folder in memory for the files of all tests of this checkout and user; None where there is no room."""
    folder = SHARED_MEMORY / f"tests-{os.getuid()}-{crc32(bytes(PROJECT)):08x}"
    shutil.rmtree(folder, ignore_errors=True)
    if not os.access(SHARED_MEMORY, os.W_OK):
        return None
    if min(shutil.disk_usage(SHARED_MEMORY).free, psutil.virtual_memory().available) < ROOM_BYTES:
        return None
    folder.mkdir(mode=0o700)
    return folder


def main(pytest: list[str]) -> int:
    """Run all lanes. Return their common exit status. pytest: the command without a lane"""
    started_s, printing, exit_codes = time.monotonic(), threading.Lock(), dict[str, int]()
    LANES_DIR.mkdir(parents=True, exist_ok=True)
    for path in LANES_DIR.iterdir():
        path.unlink()
    if folder := choose_folder():
        os.environ["PYTEST_DEBUG_TEMPROOT"] = str(folder)
    compile_tests(pytest)
    runs = [threading.Thread(target=run_lanes, args=(pytest, *run, printing, exit_codes)) for run in RUNS.items()]
    print(f"lanes of tests: {', '.join(LANES)}; each run is printed when it ends; .run/lanes has what is known", flush=True)
    for run in runs:
        run.start()
    for run in runs:
        run.join()
    lanes = [lane for run in RUNS for lane in read_lanes(run, exit_codes.get(run))]
    lanes.sort(key=lambda lane: LANES.index(lane.name))
    print(*lanes, total(lanes, time.monotonic() - started_s), sep="\n")
    failed = any(lane.failed for lane in lanes)
    if folder and not failed:
        shutil.rmtree(folder, ignore_errors=True)
    return int(failed)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # of each worker
    sys.exit(main(sys.argv[1:]))
