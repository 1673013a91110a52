"""A generation starts from the weights of the one before: known items keep their rows, and training takes fewer steps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from export.steps.learning import keep_learned, measure_erasures, plan_learning
from live.erase import PROOFS
from serving.contract.errors import ArtifactError
from serving.live.store import LEARNED
from tests.long.training.models.test_sequence import LENGTH, N_ITEMS, SHAPE, cyclic_log
from tests.present import present
from training.models.candidates.sequence import SequenceModel, SequenceShape
from training.models.candidates.train_sequence import SequenceSettings, Taken, Windows, cut_windows, train_sequence
from training.models.warm_start import EARLIER, SERVED, read_learned, write_learned

ITEM_IDS = np.arange(N_ITEMS) * 10
SETTINGS = SequenceSettings(SHAPE, epochs=20, most_events=12_000, batch_events=256, learning_rate=5e-3)


@pytest.fixture
def live(tmp_path) -> Path:
    (tmp_path / "live").mkdir()
    return tmp_path / "live"


@pytest.fixture(scope="module")
def windows() -> Windows:
    return cut_windows(Taken(*cyclic_log()), N_ITEMS, LENGTH)


@pytest.fixture(scope="module")
def learned(windows) -> SequenceModel:
    return train_sequence(windows, N_ITEMS, SETTINGS, say=lambda _: None)


def encode(model: SequenceModel, items: list[int]) -> np.ndarray:
    with torch.no_grad():
        return model.encode_moments(torch.tensor([items]), torch.zeros(1, len(items))).numpy()


def test_known_items_keep_their_rows_and_new_ones_get_one(learned, tmp_path):
    write_learned(tmp_path, ITEM_IDS, {SERVED: learned}, 1)
    later = np.sort(np.append(ITEM_IDS[1:], [5, 999]))  # one item went, two came
    model = present(read_learned(tmp_path, SERVED, later, SHAPE))
    known = np.isin(later, ITEM_IDS)
    np.testing.assert_array_equal(model.item_vectors[known], learned.item_vectors[1:])
    assert np.isfinite(model.item_vectors).all()
    assert (model.item_vectors[~known] != 0).any(axis=1).all()
    assert (model.table.weight[-1] == 0).all()  # padding
    places = np.flatnonzero(known)
    np.testing.assert_array_equal(encode(model, places[[2, 3, 4]].tolist()), encode(learned, [3, 4, 5]))


def test_going_on_takes_fewer_steps_and_loses_nothing(windows, learned, tmp_path):
    write_learned(tmp_path, ITEM_IDS, {SERVED: learned}, 1)
    messages: dict[bool, list[str]] = {True: [], False: []}
    for warm in (True, False):
        start = read_learned(tmp_path, SERVED, ITEM_IDS, SHAPE) if warm else None
        train_sequence(windows, N_ITEMS, SETTINGS, say=messages[warm].append, start=start)
    steps, losses = ({warm: read(lines[-1]) for warm, lines in messages.items()} for read in (read_steps, read_loss))
    assert steps[True] < 0.5 * steps[False]
    assert losses[True] < losses[False] + 0.05


def test_training_that_makes_it_worse_gives_the_weights_back_that_it_began_with(windows, learned, tmp_path):
    write_learned(tmp_path, ITEM_IDS, {SERVED: learned}, 1)
    wild = replace(SETTINGS, learning_rate=50.0)
    model = train_sequence(windows, N_ITEMS, wild, say=lambda _: None, start=read_learned(tmp_path, SERVED, ITEM_IDS, SHAPE))
    for kept, value in zip(learned.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(value, kept, rtol=0, atol=0)


def read_steps(line: str) -> int:
    return int(line.split(" of ")[1].split(",")[0])


def read_loss(line: str) -> float:
    return float(line.split()[-1])


def test_a_model_of_another_shape_is_learned_from_scratch(learned, tmp_path):
    write_learned(tmp_path, ITEM_IDS, {SERVED: learned}, 1)
    assert read_learned(tmp_path, SERVED, ITEM_IDS, SequenceShape(width=8, length=LENGTH)) is None
    assert read_learned(tmp_path, EARLIER, ITEM_IDS, SHAPE) is None  # there are no weights of it


def test_a_damaged_file_is_an_error_with_the_remedy(learned, tmp_path):
    write_learned(tmp_path, ITEM_IDS, {SERVED: learned}, 1)
    (tmp_path / f"{SERVED}.npz").write_bytes(b"PK\x03\x04 cut off")
    with pytest.raises(ArtifactError, match=f"Remove {tmp_path}"):
        read_learned(tmp_path, SERVED, ITEM_IDS, SHAPE)


def test_a_file_without_the_table_is_an_error_with_the_remedy(learned, tmp_path):
    write_learned(tmp_path, ITEM_IDS, {SERVED: learned}, 1)
    with np.load(tmp_path / f"{SERVED}.npz") as arrays:
        np.savez(tmp_path / f"{SERVED}.npz", **{name: arrays[name] for name in arrays if name != "table.weight"})
    with pytest.raises(ArtifactError, match=f"no table.weight. Remove {tmp_path}"):
        read_learned(tmp_path, SERVED, ITEM_IDS, SHAPE)


def publish(learned: SequenceModel | None, live: Path, serving: int, generation: int) -> str:
    """Keep weights as one round of continuous training does; every third generation learns from scratch.

    Return "scratch" or "warm", or the reason why the weights are not kept.
    """
    erasures = measure_erasures(live)
    learning = plan_learning(live, serving, live.parent / f"round-{generation}", scratch_every=3)
    write_learned(learning.keep_in, ITEM_IDS, {SERVED: learned}, learning.generations)
    return keep_learned(learning, live, serving, generation, erasures) or ("warm" if learning.start_from else "scratch")


def test_one_generation_of_some_learns_from_scratch(learned, live):
    began = [publish(learned, live, generation, generation + 1) for generation in range(1, 8)]
    assert began == ["scratch", "warm", "warm", "scratch", "warm", "warm", "scratch"]
    assert publish(None, live, 8, 9) == "warm"  # from then on there is no sequence model
    assert publish(learned, live, 9, 10) == "scratch"


def test_a_generation_goes_on_from_the_one_that_serves_and_from_no_other(learned, live):
    publish(learned, live, 1, 2)
    assert publish(learned, live, 2, 3) == "warm"
    assert publish(learned, live, 2, 4) == "warm"  # users rejected 3
    assert publish(learned, live, 1, 5) == "scratch"  # a person activated 1 again, whose weights are not kept
    assert sorted(path.name for path in (live / LEARNED).iterdir()) == ["5"]


def test_what_is_learned_is_not_kept_where_a_user_was_erased_meanwhile(learned, live):
    learning = plan_learning(live, 1, live.parent / "round", scratch_every=3)
    write_learned(learning.keep_in, ITEM_IDS, {SERVED: learned}, 1)
    before = measure_erasures(live)
    (live / PROOFS).write_text("{}\n")
    assert "erased" in keep_learned(learning, live, 1, 2, before)
    assert not (live / LEARNED).exists()
    assert keep_learned(learning, live / "gone", 1, 2, before)
    assert keep_learned(learning, live, 1, 2, measure_erasures(live)) == ""
