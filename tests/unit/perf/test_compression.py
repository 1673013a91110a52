"""What `python -m experiments.quality.compression` concludes from the networks it taught. Nothing is taught here."""

import json

import pytest
from typer.testing import CliRunner

from experiments.quality import compression
from experiments.quality.compression import SERVED, Row
from export.settings import Settings

TAUGHT = Row("as taught", 1_200, 0.2, 0.3, 0.7, {1: 100.0, 32: 900.0})
INT8 = Row(f"{SERVED}, int8 (0 products stay fp32)", 100, 0.01, 0.3, 0.01, {1: 40.0, 32: 300.0})  # not what is served
PRUNED = Row("pruned", 200, 0.01, 0.3, 0.01, {1: 60.0, 32: 500.0})


def student(ndcg_share: float, auc_share: float, macs: int = 100) -> Row:
    return Row(SERVED, macs, 0.2 * ndcg_share, 0.3, 0.7 * auc_share, {1: 40.0, 32: 300.0})


@pytest.fixture
def measured(monkeypatch):
    """-> call it with the rows that were measured: what the command answers."""

    def run(rows):
        monkeypatch.setattr(compression, "load_dataset", lambda data: None)
        monkeypatch.setattr(compression, "workload_of", lambda dataset, say: None)
        monkeypatch.setattr(compression, "variants_of", lambda work, say, folder: rows)
        monkeypatch.setattr(compression, "latencies", lambda variants, work: [row.latency_us for row in variants])
        monkeypatch.setattr(compression, "row_of", lambda variant, work, times: variant)
        return CliRunner().invoke(compression.app, [])

    return run


NDCG, AUC = f"{SERVED}: NDCG@10, of its teacher's", f"{SERVED}: AUC of candidates, of its teacher's"


@pytest.mark.parametrize(
    ("ndcg_share", "auc_share", "missed"),
    [(0.991, 0.9991, []), (0.989, 1.0, [NDCG]), (1.01, 0.998, [AUC]), (0.9, 0.9, [NDCG, AUC])],
)
def test_the_served_student_must_keep_its_teachers_quality(measured, ndcg_share, auc_share, missed):
    done = measured([TAUGHT, INT8, PRUNED, student(ndcg_share, auc_share)])
    assert json.loads(done.stdout.splitlines()[-1])["missed"] == missed
    assert done.exit_code == bool(missed), done.exception
    assert done.stdout.count("MISSED") == len(missed)


def test_the_served_student_must_be_twelve_times_smaller(measured):
    done = measured([TAUGHT, INT8, PRUNED, student(1.0, 1.0, macs=101)])
    assert json.loads(done.stdout.splitlines()[-1])["missed"] == [f"{SERVED}: its teacher's arithmetic, times its own"]
    assert done.exit_code == 1


def test_what_is_served_by_default_is_what_an_export_serves():
    assert Settings().distilled
    assert compression.STUDENT.width == Settings().table_width
