"""Run every lane, the computing ones beside the server's, and give the verdict over all: `python -m tests.lanes`.

The server lane mostly waits, the others compute: two runs of pytest at once, the second of which leaves the processor to the
first. Lanes that compute share one, because importing takes each worker ten seconds. A run writes to .run/lanes/RUN.log, which
is printed when it ends. Each run has a total of its own, and whoever reads only the last line must see all of them: it is in
pytest's own form.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import asdict, dataclass, replace
from pathlib import Path

LANES = ("unit", "long", "contract", "server", "gpu")
RUNS = {"server": 0, "unit+long+contract+gpu": 10}  # lanes of a run, how far it stands back (nice)
WORKERS = ["--numprocesses", str(1 + (os.cpu_count() or 1))]  # more than cores, because some tests wait
PROJECT = Path(__file__).parents[1]
LANES_DIR = PROJECT / ".run" / "lanes"
OUTCOMES = ("failed", "passed", "skipped", "xfailed", "xpassed", "error")  # in the order in which pytest names them


@dataclass(frozen=True)
class LaneResult:
    """counts: tests by outcome; seconds: of its tests, added up over the workers; remark: why the lane failed although no test
    did, or may have run none.
    """

    lane: str
    counts: dict[str, int]
    seconds: float
    remark: str = ""

    @property
    def ran(self) -> int:
        return sum(count for outcome, count in self.counts.items() if outcome not in ("skipped", "error"))

    @property
    def failed(self) -> int:
        return self.counts.get("failed", 0) + self.counts.get("error", 0)

    def __str__(self) -> str:
        skipped = self.counts.get("skipped", 0)
        counted = f"ran {self.ran:4d}  failed {self.failed:3d}  skipped {skipped:3d}  {self.seconds:4.0f} s"
        return f"lane {self.lane:8s} {counted}  {self.remark}".rstrip()

    def failed_for(self, reason: str) -> LaneResult:
        """The same with `reason`, counted as an error where no test accounts for the failure: the total must show it."""
        counts = self.counts if self.failed else self.counts | {"error": 1}
        return replace(self, counts=dict(counts), remark=f"FAILED: {reason}")

    def write(self, folder: Path = LANES_DIR) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{self.lane}.json").write_text(json.dumps(asdict(self)))


def read_results(folder: Path = LANES_DIR) -> list[LaneResult]:
    """One result per lane; a lane that left none has crashed, and counts as an error."""
    return [_read(folder / f"{lane}.json", lane) for lane in LANES]


def _read(path: Path, lane: str) -> LaneResult:
    if not path.is_file():
        return LaneResult(lane, {}, 0.0).failed_for("it ended without a result")
    return LaneResult(**json.loads(path.read_text()))


def total(results: list[LaneResult], seconds: float) -> str:
    """`1387 passed, 3 skipped in 290.12s`"""
    counts = sum((Counter(result.counts) for result in results), Counter())
    named = [f"{counts[o]} {'errors' if o == 'error' and counts[o] > 1 else o}" for o in OUTCOMES if counts[o]]
    return f"{', '.join(named) or 'no tests ran'} in {seconds:.2f}s"


def run_lanes(pytest: list[str], run: str, niceness: int, printing: threading.Lock) -> None:
    """Do one run. A file that cannot be imported stops no other."""
    folders = [f"tests/{lane}" for lane in run.split("+")]
    own = [*WORKERS, "--continue-on-collection-errors", "--lane", run]
    output = LANES_DIR / f"{run}.log"
    with output.open("w") as file:
        subprocess.run(["nice", f"-n{niceness}", *pytest, *own, *folders], cwd=PROJECT, stdout=file, stderr=subprocess.STDOUT)
    with printing:
        print(f"\n--- {run}\n{output.read_text(errors='replace')}", flush=True)


def main(pytest: list[str]) -> int:
    """pytest: the command without a lane -> the exit status of all lanes together."""
    started_s, printing = time.monotonic(), threading.Lock()
    LANES_DIR.mkdir(parents=True, exist_ok=True)
    for path in LANES_DIR.iterdir():
        path.unlink()
    runs = [threading.Thread(target=run_lanes, args=(pytest, run, niceness, printing)) for run, niceness in RUNS.items()]
    print(f"lanes of tests: {', '.join(LANES)}; each run is printed when it ends; .run/lanes has what is known", flush=True)
    for run in runs:
        run.start()
    for run in runs:
        run.join()
    results = read_results()
    print(*results, total(results, time.monotonic() - started_s), sep="\n")
    return int(any(result.failed for result in results))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # of each worker
    sys.exit(main(sys.argv[1:]))
