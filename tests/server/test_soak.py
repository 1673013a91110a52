"""A minute of updates, evictions and SIGKILLs (perf/soak_tiers.py: ten by default): no row is torn, mixed up, stale or lost."""

import json
import subprocess
import sys

from server.environment import PROJECT

SECONDS = 60


def test_every_served_row_is_one_that_may_be_served_then():
    command = [sys.executable, "perf/soak_tiers.py", "--seconds", str(SECONDS), "--instances", "2", "--rows", "5000"]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, timeout=5 * SECONDS)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["wrong_rows"] == report["failed_instances"] == 0, report["by_kind"]
    assert min(report["lookups"], report["rows_published"]) > 1_000
    assert report["kills"] >= 5
