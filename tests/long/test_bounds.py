"""Compiled loops read and write within their arrays, whatever a record holds."""

import json
import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace

import numpy as np

from experiments.forged import Known, forge_fields
from server.start.environment import PROJECT
from serving.contract.tensors import PAD_ID, STAGES
from serving.pipeline import Pipeline
from tests.repositories import small_repository


def test_stages_stay_within_their_arrays_on_forged_records(tmp_path):
    """A slice of `python -m experiments.malformed --loops`. Loops with checks are compiled once, beside those without."""
    command = [sys.executable, "-m", "experiments.malformed", "--repo", str(small_repository()), "--loops", "400"]
    checked = os.environ | {"NUMBA_BOUNDSCHECK": "1"}
    done = subprocess.run(
        [*command, "--results", str(tmp_path)], cwd=PROJECT, env=checked, capture_output=True, text=True, timeout=600
    )
    assert done.stdout, done.stderr
    figures = {figure["figure"]: figure["value"] for figure in json.loads(done.stdout.splitlines()[-1])["figures"]}
    assert figures["loops with bounds checked: outside, or no number"] == 0, done.stdout
    for stage in STAGES:  # a stage that refuses all has run none of its loops
        assert figures[f"loops with bounds checked: {stage}: answered"] > 25, done.stdout


def test_forged_records_name_items_and_categories_that_exist_among_others():
    repo, rng = small_repository(), np.random.default_rng(0)
    pipeline = Pipeline.load(repo)
    known, spec, stage = Known.read(repo, pipeline), pipeline.specs["retrieve"], pipeline.stages["retrieve"]
    forged = [forge_fields(spec, pipeline.info.generation, known, rng) for _ in range(100)]
    for name in ("history_ids", "exclude", "among"):
        shares = np.array([np.isin(fields[name], known.item_ids).mean() for fields in forged])
        assert (shares == 1.0).mean() > 0.25, name
        assert (shares < 1.0).mean() > 0.25, name
    with_mugs = replace(known, categories=("mugs",))
    categories = Counter(forge_fields(spec, 1, with_mugs, rng)["category"].item() for _ in range(100))
    assert categories[b"mugs"] > 10
    assert categories[b"mugs"] + categories[b""] < 90
    in_tables = [fields for fields in forged if (fields["user_categorical"] // known.user_rows == 0).all()]
    assert 25 < len(in_tables) < 75
    found = [(stage(fields)["candidate_ids"] != PAD_ID).any() for fields in in_tables]
    assert np.mean(found) > 0.25
    pipeline.close()
