"""What the processes of a server have of the cores, on processes that do not exist."""

from types import SimpleNamespace

import pytest

from perf.observe import processor_time
from perf.observe.processor_time import PerAnswer, ProcessorTime


def process(pid, name, user, system):
    return SimpleNamespace(pid=pid, name=lambda: name, cpu_times=lambda: SimpleNamespace(user=user, system=system))


def test_the_models_are_counted_beside_the_server(monkeypatch, tmp_path):
    found = {
        "a tag": [
            process(1, "tritonserver", 3.0, 1.0),
            process(2, "triton_python_b", 5.0, 0.5),
            process(3, "triton_python_b", 6.0, 0.25),
        ]
    }
    for pid, waited_ns in ((1, [5e8, 25e7]), (2, [1e9]), (3, [2e9, 0])):
        for thread, ns in enumerate(waited_ns):
            (tmp_path / str(pid) / "task" / str(thread)).mkdir(parents=True)
            (tmp_path / str(pid) / "task" / str(thread) / "schedstat").write_text(f"123456 {ns:.0f} 7\n")
    monkeypatch.setattr(processor_time, "members", found.__getitem__)
    monkeypatch.setattr(processor_time, "PROC", tmp_path)
    assert processor_time.processor_time("a tag") == ProcessorTime(4.0, 11.75, server_waited_s=0.75, models_waited_s=3.0)


def test_time_is_of_each_answer_since():
    now, before = ProcessorTime(4.0, 11.75, 2.0, 1.0), ProcessorTime(3.0, 9.75, 1.6, 0.2)
    assert now.per_answer(before, answers=4_000) == pytest.approx(PerAnswer(250.0, 500.0, 100.0, 200.0))
