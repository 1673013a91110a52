"""Two repositories in turns: their ratio by round, and what is refused."""

import subprocess

import pytest

from perf import ab
from perf.ratio import Ratio
from perf.report import tables
from serving.contract.errors import ConfigError


def test_interleaving_alternates_and_pairs_by_round():
    order = []

    def measured(name, values):
        rates = iter(values)

        def call():
            order.append(name)
            return {"rate": next(rates)}

        return call

    (ratio,) = ab.interleave(measured("A", [10.0, 100.0, 20.0]), measured("B", [20.0, 150.0, 60.0]), 3, lambda _: None)
    assert order == ["A", "B", "B", "A", "A", "B"]
    assert ratio.by_round.tolist() == [2.0, 1.5, 3.0]
    assert (ratio.median, ratio.low, ratio.high) == (2.0, 1.5, 3.0)


@pytest.mark.parametrize(
    ("b", "words"),
    [([0.9] * 5, "every round agrees"), ([0.9] * 4 + [1.1], "may be chance"), ([0.9] * 4, "may be chance"), ([0.5], "may be")],
)
def test_a_ratio_is_certain_if_enough_rounds_agree(b, words):
    """Four rounds of equals agree by chance in one comparison of eight, and one round always agrees."""
    ratio = Ratio(metric="x", a=[1.0] * len(b), b=b)
    assert ratio.certain == (words == "every round agrees")
    assert tables.make_ratio_table([ratio]).rows[0].cells[-1].startswith(words)


def test_neither_a_folder_nor_a_commit_is_refused():
    with pytest.raises(ConfigError, match="neither a repository folder nor a commit"), ab.repository("no-such-thing", "x"):
        pass


@pytest.mark.parametrize("name", ["shop", "online-retail"])
def test_a_commit_exports_the_callers_folder_or_the_bundled_data_set(tmp_path, monkeypatch, name):
    commands = []

    def note(command, **_):
        commands.append(command)
        return subprocess.CompletedProcess(command, 0)

    (tmp_path / "shop").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(subprocess, "run", note)
    with ab.repository("HEAD", name):
        pass
    [export] = [command for command in commands if "export" in command]
    assert export[export.index("--data") + 1] == {"shop": str(tmp_path / "shop")}.get(name, name)
