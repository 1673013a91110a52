"""Compiled loops read and write within their arrays, whatever a record holds."""

import json
import os
import subprocess
import sys

from server.start.environment import PROJECT
from tests.repositories import small_repository


def test_stages_stay_within_their_arrays_on_forged_records(tmp_path):
    """A slice of `python -m experiments.malformed --loops`. Loops with checks are compiled once, beside those without."""
    command = [sys.executable, "-m", "experiments.malformed", "--repo", str(small_repository()), "--loops", "200"]
    checked = os.environ | {"NUMBA_BOUNDSCHECK": "1"}
    done = subprocess.run(
        [*command, "--results", str(tmp_path)], cwd=PROJECT, env=checked, capture_output=True, text=True, timeout=600
    )
    assert done.stdout, done.stderr
    figures = {figure["figure"]: figure["value"] for figure in json.loads(done.stdout.splitlines()[-1])["figures"]}
    assert figures["loops with bounds checked: outside, or no number"] == 0, done.stdout
    assert figures["loops with bounds checked: answered"] > 100
