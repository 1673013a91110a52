"""Processor time by process of a server, on processes that do not exist."""

from types import SimpleNamespace

import pytest

from perf import processor_time
from perf.processor_time import ProcessorTime


def process(name, user, system):
    return SimpleNamespace(name=lambda: name, cpu_times=lambda: SimpleNamespace(user=user, system=system))


def test_the_models_are_counted_beside_the_server(monkeypatch):
    found = {
        "a tag": [
            process("tritonserver", 3.0, 1.0),
            process("triton_python_b", 5.0, 0.5),
            process("triton_python_b", 6.0, 0.25),
        ]
    }
    monkeypatch.setattr(processor_time, "members", found.__getitem__)
    assert processor_time.processor_time("a tag") == ProcessorTime(server_s=4.0, models_s=11.75)


def test_time_is_of_each_answer_since():
    now, before = ProcessorTime(server_s=4.0, models_s=11.75), ProcessorTime(server_s=3.0, models_s=9.75)
    assert now.us_per_answer(before, answers=4_000) == pytest.approx((250.0, 500.0))
