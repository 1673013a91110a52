"""The verdict over all lanes: `python -m tests.lanes` prints a line per lane, then the total in pytest's own form.

`make test` runs one pytest per lane, each with a total of its own: whoever reads only the last line must see all of them.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass, replace
from pathlib import Path

LANES = ("unit", "contract", "server", "gpu")
LANES_DIR = Path(__file__).parents[1] / ".run" / "lanes"
OUTCOMES = ("failed", "passed", "skipped", "xfailed", "xpassed", "error")  # in the order in which pytest names them


@dataclass(frozen=True)
class LaneResult:
    """counts: tests by outcome; remark: why the lane failed although no test did, or may have run none."""

    lane: str
    counts: dict[str, int]
    seconds: float
    remark: str = ""

    @property
    def ran(self) -> int:
        return sum(count for outcome, count in self.counts.items() if outcome not in ("skipped", "error"))

    def __str__(self) -> str:
        count = Counter(self.counts)
        failed, skipped = count["failed"] + count["error"], count["skipped"]
        return f"lane {self.lane:8s} ran {self.ran:4d}  failed {failed:3d}  skipped {skipped:3d}  {self.remark}".rstrip()

    def failed_for(self, reason: str) -> LaneResult:
        """The same with `reason`, counted as an error where no test accounts for the failure: the total must show it."""
        counts = Counter(self.counts)
        if not counts["failed"] + counts["error"]:
            counts["error"] = 1
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


def total(results: list[LaneResult]) -> str:
    """`1387 passed, 3 skipped in 290.12s`"""
    counts = sum((Counter(result.counts) for result in results), Counter())
    named = [f"{counts[o]} {'errors' if o == 'error' and counts[o] > 1 else o}" for o in OUTCOMES if counts[o]]
    return f"{', '.join(named) or 'no tests ran'} in {sum(result.seconds for result in results):.2f}s"


if __name__ == "__main__":
    results = read_results()
    print(*results, total(results), sep="\n")
