"""The four lanes: unit (no tritonserver, loopback only), contract (fake backend), server (real process), gpu.

`--lane NAME` (from `make test`) makes a run answer for its lane: one summary line, kept under .run/lanes/ for the verdict over
all four, and failure when no test ran. Only the gpu lane may skip everything, each test with its reason.
"""

from __future__ import annotations

from pathlib import Path

import pytest

LANES = ("unit", "contract", "server", "gpu")
LANES_DIR = Path(__file__).parents[1] / ".run" / "lanes"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--lane", choices=LANES, help="fail when no test of this lane ran, and keep its summary line")


def _counts(session: pytest.Session) -> dict[str, int]:
    """outcome -> number of tests; a test that failed while being set up counts as an error."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    return {
        outcome: len(reporter.stats.get(outcome, ()))
        for outcome in ("passed", "failed", "error", "skipped", "xfailed", "xpassed")
    }


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    lane = session.config.getoption("--lane")
    if lane is None:
        return
    counts = _counts(session)
    ran = sum(counts.values()) - counts["skipped"]
    line = f"lane {lane:8s} ran {ran:4d}  failed {counts['failed'] + counts['error']:3d}  skipped {counts['skipped']:3d}"
    if ran == 0 and lane == "gpu":
        line += "  (needs a GPU: each skip states its reason)" if counts["skipped"] else "  (it holds no test yet)"
        if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:
            session.exitstatus = pytest.ExitCode.OK
    elif ran == 0:
        line += "  FAILED: no test ran"
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
    elif exitstatus != pytest.ExitCode.OK:
        line += "  FAILED"
    LANES_DIR.mkdir(parents=True, exist_ok=True)
    (LANES_DIR / f"{LANES.index(lane)}-{lane}").write_text(line + "\n")
    session.config.stash[_LINE] = line


_LINE = pytest.StashKey[str]()


def pytest_terminal_summary(terminalreporter) -> None:
    line = terminalreporter.config.stash.get(_LINE, None)
    if line is not None:
        terminalreporter.write_line(line, bold=True)
