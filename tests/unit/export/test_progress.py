"""An export prints a line for each phase, and details only with --verbose."""

import io

import pytest
from rich.console import Console

from export.progress import Progress


def printed(verbose: bool) -> list[str]:
    out = io.StringIO()
    progress = Progress(Console(file=out, width=120), verbose)
    with progress.phase("ranker") as phase:
        progress.note_detail("epoch 1 of 2")
        progress.note_detail("epoch 2 of 2")
        phase.result = "NDCG@10 0.2"
    return out.getvalue().splitlines()


def test_a_phase_is_one_line_with_its_seconds_and_result():
    (line,) = printed(verbose=False)
    assert line.split() == ["0", "s", "ranker", "0", "s", "NDCG@10", "0.2"]


def test_details_come_before_the_line_of_their_phase():
    assert [line.split("s", 1)[1].strip() for line in printed(verbose=True)[:2]] == ["epoch 1 of 2", "epoch 2 of 2"]
    assert len(printed(verbose=True)) == 3


def test_the_log_of_a_long_phase_has_a_detail_now_and_then(monkeypatch):
    monkeypatch.setattr("export.progress.SILENT_S", 0.0)
    assert [line.split("s", 1)[1].strip() for line in printed(verbose=False)[:2]] == ["epoch 1 of 2", "epoch 2 of 2"]


def test_a_phase_that_fails_is_not_done():
    out = io.StringIO()
    progress = Progress(Console(file=out))
    with pytest.raises(ZeroDivisionError), progress.phase("ranker"):
        raise ZeroDivisionError
    assert out.getvalue() == ""


def test_memory_is_that_of_the_process():
    out = io.StringIO()
    Progress(Console(file=out, width=120)).note_memory()
    assert 0.01 < float(out.getvalue().split("at most ")[1].split(" GiB")[0]) < 100


def test_brackets_are_text_and_not_markup():
    out = io.StringIO()
    progress = Progress(Console(file=out, width=120), verbose=True)
    with progress.phase("[new]") as phase:
        progress.note_detail("epoch [1/2]")
        phase.result = "published in shops[/a]"
    detail, line = out.getvalue().splitlines()
    assert detail.endswith("epoch [1/2]")
    assert line.split()[2:] == ["[new]", "0", "s", "published", "in", "shops[/a]"]
