"""The retrieve stage on a small hand-made folder: its answers against a slow twin, its filters, its fallback, its refusals."""

import json
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest
import torch

from serving.contract.artifacts import StageInfo
from serving.contract.errors import ArtifactError, RequestError
from serving.contract.tensors import PAD_ID, PAD_SCORE, Axes, Degraded, Sources, make_stage_specs, new_lineage
from serving.live.reader import Reader
from serving.stages.candidate_lists import RetrieveSettings, map_source_columns
from serving.stages.features.ids import ItemIndex
from serving.stages.features.user_store import SeenItems
from serving.stages.live.content import Content
from serving.stages.retrieve import POPULARITY, Retrieve
from serving.stages.rules.config import CONFIG_FILE as RULES_FILE
from serving.stages.search.search import Neighbours, Search, compute_recency_weights
from training.models.candidates.two_tower import UserTower
from training.models.parity import export_network
from training.retrieval.save import DYNAMIC

N_ITEMS, TASTE, N_USER_ROWS, EMBEDDING = 60, 7, 5, 3
AXES = Axes(candidates=10, history=4, exclusions=3, items_returned=5, user_categorical=2, user_continuous=2)
ITEM_IDS = np.arange(N_ITEMS) * 10 + 100
USERS = np.array([7, 8, 9])
SEEN = {7: [100, 110, 120], 8: [], 9: ITEM_IDS[:55].tolist()}
UNAVAILABLE = [3, 30]
CATEGORIES = [("bags", "lämps", None)[i % 3] for i in range(N_ITEMS)]
GENERATION = 4


def write_folder(folder, filter_seen=True):
    rng = np.random.default_rng(0)
    torch.manual_seed(0)

    def small(*shape):
        return rng.normal(size=shape).astype(np.float32)

    network = UserTower(TASTE, 2 * EMBEDDING, AXES.user_continuous)
    (*_, last) = network.mlp.children()
    torch.nn.init.normal_(last.get_parameter("weight"))
    inputs = {
        "history_vectors": small(2, AXES.history, TASTE),
        "history_weights": np.abs(small(2, AXES.history)),
        "user_embeddings": small(2, 2 * EMBEDDING),
        "user_continuous": small(2, AXES.user_continuous),
    }
    export_network(network, inputs, "user_vectors", folder / "user_tower.onnx", DYNAMIC)
    (folder / "tables").mkdir()
    history_table = small(N_ITEMS + 1, TASTE)
    history_table[-1] = 0
    np.save(folder / "tables" / "history.npy", history_table)
    for slot in range(2):
        np.save(folder / "tables" / f"user_{slot}.npy", small(N_USER_ROWS, EMBEDDING))
    np.save(folder / "item_ids.npy", ITEM_IDS)
    np.save(folder / "item_vectors.npy", small(N_ITEMS, TASTE + 1))
    available = np.ones(N_ITEMS, bool)
    available[UNAVAILABLE] = False
    np.save(folder / "available.npy", available)
    positions = rng.integers(0, N_ITEMS, (N_ITEMS + 1, 4)).astype(np.int32)
    weights = np.abs(small(N_ITEMS + 1, 4))
    positions[-1], weights[-1] = N_ITEMS, 0
    Neighbours(positions, weights).save(folder)
    offsets = np.cumsum([0, *(len(SEEN[user]) for user in USERS)])
    SeenItems(USERS, offsets, np.array([item for user in USERS for item in SEEN[user]])).save(folder)
    np.save(folder / f"{POPULARITY}.npy", np.zeros(N_ITEMS + 1, np.float32))
    Content.of([{"category": category} for category in CATEGORIES]).save(folder)
    (folder / RULES_FILE).write_text("{}")
    settings = {"user_tables": ["user_0", "user_1"], "filter_seen": filter_seen, "index": "exact"}
    StageInfo("retrieve", GENERATION, AXES, (), settings).write(folder)
    return network, history_table


def requests(users=(7, 8, 9, 1234), exclude=None):
    rng = np.random.default_rng(1)
    batch = len(users)
    history = rng.choice(ITEM_IDS, (batch, AXES.history))
    history[-1] = PAD_ID  # the last one is new
    return {
        "user_id": np.array(users)[:, None],
        "user_categorical": rng.integers(0, N_USER_ROWS, (batch, 2)),
        "user_continuous": rng.normal(size=(batch, 2)).astype(np.float32),
        "history_ids": history,
        "history_age_days": np.zeros(history.shape, np.float32),
        "exclude": np.full((batch, AXES.exclusions), PAD_ID) if exclude is None else exclude,
        "category": np.full((batch, 1), b"", object),
        "among": np.full((batch, AXES.candidates), PAD_ID),
        "lineage": new_lineage(batch, GENERATION, Degraded.PREPROCESS),
    }


def retrieve_slowly(folder, network, inputs, filter_seen=True):
    """One request at a time, with the trained torch network and a plain loop over the catalogue."""
    index = ItemIndex(ITEM_IDS)
    vectors, available = np.load(folder / "item_vectors.npy"), np.load(folder / "available.npy")
    neighbours, history_table = Neighbours.load(folder), np.load(folder / "tables" / "history.npy")
    tables = [np.load(folder / "tables" / f"user_{slot}.npy") for slot in range(2)]
    answers = []
    for row, user in enumerate(inputs["user_id"][:, 0].tolist()):
        history = index.find_positions(inputs["history_ids"][row])
        weights = compute_recency_weights(history[None], N_ITEMS)
        embeddings = np.concatenate([table[inputs["user_categorical"][row, s]] for s, table in enumerate(tables)])
        feeds = (history_table[history][None], weights, embeddings[None], inputs["user_continuous"][row][None])
        with torch.no_grad():
            vector = network(*(torch.from_numpy(value) for value in feeds)).numpy()[0]
        scores = (vectors @ vector).tolist()
        for h, item in enumerate(history.tolist()):
            for other, weight in zip(neighbours.positions[item], neighbours.weights[item], strict=True):
                if other < N_ITEMS:
                    scores[other] += float(weights[0, h] * weight)
        never = set(inputs["exclude"][row].tolist())
        wanted, named = inputs["category"][row, 0].decode(), {item for item in inputs["among"][row].tolist() if item >= 0}
        if filter_seen and not named:
            never |= set(SEEN.get(user, [])) | set(inputs["history_ids"][row].tolist())
        left = [i for i in range(N_ITEMS) if available[i] and ITEM_IDS[i] not in never and wanted in ("", CATEGORIES[i])]
        left = [i for i in left if not named or ITEM_IDS[i] in named]
        best = sorted(left, key=lambda i: -scores[i])[: AXES.candidates]
        answers.append([int(ITEM_IDS[i]) for i in best] + [PAD_ID] * (AXES.candidates - len(best)))
    return np.array(answers)


def test_candidates_within_categories_and_named_items_equal_the_slow_twin_in_a_mixed_batch_and_alone(tmp_path):
    network, _ = write_folder(tmp_path)
    users = (7, 8, 9, 1234, 5, 6, 7, 7, 8, 1234, 5, 6)
    inputs = requests(users, exclude=np.array([[200, 210, PAD_ID]] * len(users)))
    inputs["category"][:, 0] = ["lämps".encode(), b"", b"bags", b"bags", b"unheard of", "lämps".encode(), *[b""] * 6]
    seen_excluded_unavailable_unknown = [110, 200, 130, 5]
    inputs["among"][6, 2:] = [*seen_excluded_unavailable_unknown, 300, 690, 300, 310]  # in any place, and repeated
    inputs["among"][7, :4] = seen_excluded_unavailable_unknown
    inputs["among"][8] = inputs["among"][9] = np.arange(400, 500, 10)
    inputs["category"][9, 0] = b"bags"
    inputs["among"][10, 0] = 1_000_000
    inputs["among"][11, 3] = -7  # no id: the whole catalogue
    stage = Retrieve.load(tmp_path)
    got = stage(inputs)
    np.testing.assert_array_equal(got["candidate_ids"], retrieve_slowly(tmp_path, network, inputs))
    n_found = (got["candidate_ids"] != PAD_ID).sum(axis=1)
    assert n_found[[1, 4, 7, 10, 11]].tolist() == [10, 0, 1, 0, 10]
    assert got["candidate_ids"][7, 0] == 110  # seen: a caller who names an item wants its place
    assert 0 < n_found[6] <= 4
    assert not (got["lineage"][:, 1] & Degraded.RETRIEVE).any()  # short lists of a choice lack nothing
    for row in range(len(users)):
        alone = stage({name: values[row : row + 1] for name, values in inputs.items()})
        for name, values in alone.items():
            if name != "retrieval_scores":
                np.testing.assert_array_equal(values[0], got[name][row])
        np.testing.assert_allclose(alone["retrieval_scores"][0], got["retrieval_scores"][row], atol=1e-5)


@pytest.mark.parametrize("filter_seen", [True, False])
def test_candidates_equal_the_slow_twin(tmp_path, filter_seen):
    network, _ = write_folder(tmp_path, filter_seen=filter_seen)
    exclude = np.array([[200, 210, PAD_ID], [PAD_ID, 5, -7], [650, PAD_ID, PAD_ID], [690, 690, 680]])
    inputs = requests(exclude=exclude)
    stage = Retrieve.load(tmp_path)
    got = stage(inputs)
    np.testing.assert_array_equal(got["candidate_ids"], retrieve_slowly(tmp_path, network, inputs, filter_seen))
    short = (got["candidate_ids"] != PAD_ID).sum(axis=1, keepdims=True) < AXES.items_returned
    np.testing.assert_array_equal(got["lineage"][:, 1:2], Degraded.PREPROCESS | np.where(short, int(Degraded.RETRIEVE), 0))
    assert stage.find_faults(inputs) == {}
    for tensor in make_stage_specs(AXES)["retrieve"].output_fields:
        assert got[tensor.name].shape == (4, *tensor.dims)
        assert got[tensor.name].dtype == tensor.numpy_dtype
    falling = np.diff(np.maximum(got["retrieval_scores"], -1e9), axis=1) <= 0
    assert falling.all()


def test_a_pinned_item_is_a_candidate_of_every_request_that_may_get_it(tmp_path):
    """It takes the place of the last candidate that is not pinned; the others stay as they are."""
    seen, gone, other, unknown, plain = 100, int(ITEM_IDS[UNAVAILABLE[0]]), 110, 5, 690
    write_folder(tmp_path)
    users = (7, 8, 1234, 8, 8, 8)
    inputs = requests(users, exclude=np.array([[PAD_ID] * 3] * 3 + [[plain, PAD_ID, PAD_ID]] + [[PAD_ID] * 3] * 2))
    inputs["history_ids"][:] = PAD_ID
    inputs["category"][4, 0] = CATEGORIES[ITEM_IDS.tolist().index(other)].encode()
    inputs["among"][5, :3] = [other, 200, 210]
    before = Retrieve.load(tmp_path)(inputs)["candidate_ids"]
    pinned = [{"item_id": item, "slot": slot} for slot, item in enumerate((seen, gone, other, unknown, plain))]
    (tmp_path / RULES_FILE).write_text(json.dumps({"pinned": pinned}))
    after = Retrieve.load(tmp_path)(inputs)["candidate_ids"]
    allowed = [{plain}, {seen, other, plain}, {seen, other, plain}, {seen, other}, {other}, {other}]
    for row, expected in enumerate(allowed):
        listed = set(after[row].tolist()) - {PAD_ID}
        assert listed & {seen, gone, other, unknown, plain} == expected
        unpinned = [item for item in before[row].tolist() if item not in {*expected, PAD_ID}]
        n_free = AXES.candidates - len(expected)
        assert [item for item in after[row].tolist() if item in unpinned] == unpinned[:n_free]
    assert (after[0] != before[0]).sum() <= 1


def test_a_folder_without_rules_is_refused(tmp_path):
    """An older version, which did not publish them here, left pinned items out of lists of which they were no candidates."""
    write_folder(tmp_path)
    (tmp_path / RULES_FILE).unlink()
    with pytest.raises(
        ArtifactError, match=r"the rules in .* cannot be loaded: .*No such file.* Export the repository again\."
    ):
        Retrieve.load(tmp_path)


def test_one_request_is_answered_as_in_a_batch(tmp_path):
    write_folder(tmp_path)
    stage, inputs = Retrieve.load(tmp_path), requests()
    together = stage(inputs)
    for row in range(4):
        alone = stage({name: values[row : row + 1] for name, values in inputs.items()})
        np.testing.assert_array_equal(alone["candidate_ids"][0], together["candidate_ids"][row])
        np.testing.assert_allclose(alone["retrieval_scores"][0], together["retrieval_scores"][row], atol=1e-5)


def test_a_user_who_has_nearly_everything_gets_what_is_left(tmp_path):
    write_folder(tmp_path)
    inputs = requests(users=(9,))
    inputs["history_ids"][:] = PAD_ID
    got, n_left = Retrieve.load(tmp_path)(inputs), len(ITEM_IDS[55:])
    assert set(got["candidate_ids"][0].tolist()) == {*ITEM_IDS[55:].tolist(), PAD_ID}
    assert (got["retrieval_scores"][0, n_left:] == np.float32(PAD_SCORE)).all()
    assert not (got["lineage"][0, 1] & Degraded.RETRIEVE).any()  # they fill an answer


def test_a_broken_user_vector_falls_back_to_the_items_own_appeal(tmp_path):
    write_folder(tmp_path)
    inputs = requests(users=(8, 8))
    inputs["history_ids"][:] = PAD_ID
    inputs["user_continuous"][0] = np.nan
    got = Retrieve.load(tmp_path)(inputs)
    assert got["lineage"][:, 1].tolist() == [Degraded.PREPROCESS | Degraded.RETRIEVE, Degraded.PREPROCESS]
    appeal = np.load(tmp_path / "item_vectors.npy")[:, -1]
    appeal[UNAVAILABLE] = -np.inf
    np.testing.assert_array_equal(got["candidate_ids"][0], ITEM_IDS[np.argsort(-appeal)[: AXES.candidates]])


def test_items_that_only_their_popularity_proposes_say_so_and_a_taste_counts_without_popularity(tmp_path):
    write_folder(tmp_path)
    vectors = np.load(tmp_path / "item_vectors.npy")
    vectors[:, -1] -= 20.0  # a logarithm of a share of sales, which outweighs every taste
    vectors[UNAVAILABLE] = 1e4  # does not count for the mean, nor do the rows that an export keeps free
    np.save(tmp_path / "item_vectors.npy", vectors)
    inputs = requests(users=(8, 8))
    inputs["history_ids"][:] = PAD_ID
    inputs["user_continuous"][0] = np.nan  # falls back to an unknown user's vector
    got = Retrieve.load(tmp_path)(inputs)
    assert (got["candidate_sources"][0] == Sources.POPULAR).all()
    assert np.mean((got["candidate_sources"][1] & Sources.TWO_TOWER) > 0) > 0.5


@pytest.mark.parametrize(
    ("sequence", "graph", "expected"),
    [
        (3, 2, {Sources.SEQUENCE: slice(0, 3), Sources.GRAPH: slice(3, 5), Sources.TWO_TOWER: slice(5, 8)}),
        (0, 2, {Sources.GRAPH: slice(0, 2), Sources.TWO_TOWER: slice(2, 8)}),
        (0, 0, {Sources.TWO_TOWER: slice(0, 8)}),
    ],
)
def test_each_model_of_a_generation_is_a_source_with_columns_of_its_own(sequence, graph, expected):
    assert map_source_columns(RetrieveSettings((), True, "exact", sequence_width=sequence, graph_width=graph), 8) == expected


def test_a_list_too_short_to_fill_the_answer_says_so(tmp_path):
    write_folder(tmp_path)
    retrieve = Retrieve.load(tmp_path)
    whole = retrieve.search
    short = Search(whole.item_vectors, whole.neighbours, available=np.arange(N_ITEMS) < 3)
    got = replace(retrieve, outputs=replace(retrieve.outputs, search=short))(requests())
    assert ((got["candidate_ids"] != PAD_ID).sum(axis=1) < AXES.items_returned).all()
    assert (got["lineage"][:, 1] == Degraded.PREPROCESS | Degraded.RETRIEVE).all()


def test_candidates_of_a_catalogue_that_may_be_out_of_date_say_so(tmp_path):
    """Also where what users have seen can be read, as from Redis."""
    write_folder(tmp_path)
    stage, inputs = Retrieve.load(tmp_path), requests()
    history = stage.items.find_positions(inputs["history_ids"])
    vectors = stage.compute_user_vectors(inputs, history)
    with closing(Reader(tmp_path / "live")) as reader:
        outputs = stage.outputs.with_live(reader)
        for is_current, expected in ((True, 0), (False, Degraded.LIVE)):
            lineage = outputs.find_candidates(inputs, history, vectors, is_current)["lineage"]
            assert (lineage[:, 1] & Degraded.LIVE == expected).all()


def test_another_generation_is_a_fault_of_that_row(tmp_path):
    write_folder(tmp_path)
    inputs = requests()
    inputs["lineage"][2, 0] = 3
    assert Retrieve.load(tmp_path).find_faults(inputs) == {
        2: "generation is 3, this stage serves 4; send requests through the ensemble"
    }


@pytest.mark.parametrize("row", [-1, N_USER_ROWS, 2**62])
def test_a_row_that_no_table_has_is_the_callers_fault(tmp_path, row):
    write_folder(tmp_path)
    inputs = requests()
    inputs["user_categorical"][2, 1] = row
    said = f"row {row} of the embedding table 'user_1', which has the rows 0 to {N_USER_ROWS - 1}.*`recommend`"
    with pytest.raises(RequestError, match=said):
        Retrieve.load(tmp_path)(inputs)


def lose_setting(folder):
    raw = json.loads((folder / "stage.json").read_text())
    del raw["settings"]["index"]
    (folder / "stage.json").write_text(json.dumps(raw))


def too_few_tables(folder):
    raw = json.loads((folder / "stage.json").read_text())
    raw["settings"]["user_tables"] = ["user_0"]
    (folder / "stage.json").write_text(json.dumps(raw))


def wants_index(folder):
    raw = json.loads((folder / "stage.json").read_text())
    raw["settings"]["index"] = "lists"
    (folder / "stage.json").write_text(json.dumps(raw))


def wrong_index(folder):
    import faiss

    wants_index(folder)
    index = faiss.IndexFlatIP(TASTE)
    faiss.write_index(index, str(folder / "items.faiss"))


def broken_index(folder):
    wants_index(folder)
    (folder / "items.faiss").write_bytes(b"not an index")


def no_neighbours(n_items):
    return Neighbours(np.full((n_items + 1, 1), n_items, np.int32), np.zeros((n_items + 1, 1), np.float32))


def index_beyond(folder, kind, missing=0):
    import faiss

    wants_index(folder)
    n_available, width = N_ITEMS - len(UNAVAILABLE) - missing, TASTE + 2
    flat = faiss.IndexFlatL2(width)
    index = faiss.IndexIDMap(flat) if kind == "flat" else faiss.IndexIVFFlat(flat, width, 4)
    vectors = np.random.default_rng(0).normal(size=(n_available, width)).astype(np.float32)
    index.train(vectors)
    index.add_with_ids(vectors, np.arange(n_available) + 10**9)
    faiss.write_index(index, str(folder / "items.faiss"))


def changed(name, change):
    """Return what damages the array `name` of a folder."""
    return lambda folder: np.save(folder / f"{name}.npy", change(np.load(folder / f"{name}.npy")))


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lose_setting, "has other settings than retrieve expects"),
        (too_few_tables, "names 1 user tables; expected 2"),
        (lambda folder: (folder / "tables" / "user_1.npy").unlink(), r"lacks the tables \['user_1'\]"),
        (lambda folder: np.save(folder / "item_ids.npy", ITEM_IDS[:-1]), "holds 59 items, but found"),
        (lambda folder: no_neighbours(N_ITEMS - 1).save(folder), "holds 60 items, but found .*'neighbours': 59"),
        (lambda folder: (folder / "item_vectors.npy").unlink(), "cannot be opened as an array"),
        (lambda folder: (folder / "user_tower.onnx").write_bytes(b""), "cannot be loaded by ONNX Runtime"),
        (wants_index, "items.faiss cannot be read by Faiss"),
        (broken_index, "items.faiss cannot be read by Faiss"),
        (lambda folder: np.save(folder / "tables" / "history.npy", np.zeros((60, TASTE), "f4")), "has 60 rows in history.npy"),
        (lambda folder: Content.of([{}]).save(folder), "content/codes.npy holds 1 items; expected 60"),
        (wrong_index, "holds 0 vectors of width 7; expected 58 of width 9"),
        (lambda folder: index_beyond(folder, "flat", missing=1), "holds 57 vectors of width 9; expected 58 of width 9"),
        (lambda folder: index_beyond(folder, "flat"), "holds values from 1000000000 to .*; expected 0 to 59"),
        (lambda folder: index_beyond(folder, "lists"), "holds values from 1000000.* to .*; expected 0 to 59"),
        (changed("available", lambda array: array[:10]), r"holds bool \[10\]; expected bool \[60\]"),
        (changed("item_vectors", lambda array: array.astype(np.float64)), r"holds float64 \[60, 8\]; expected float32"),
        (changed("item_vectors", np.asfortranarray), "holds float32 .*, not in C order"),
        (changed("seen.item_ids", lambda array: array.astype(np.float64)), r"item_ids\.npy holds float64 .*; expected int64"),
        (
            changed("seen.user_ids", lambda array: array[::-1]),
            r"user_ids\.npy is not ascending; expected ids in ascending order",
        ),
    ],
)
def test_a_damaged_folder_is_refused(tmp_path, damage, said):
    write_folder(tmp_path)
    damage(tmp_path)
    with pytest.raises(ArtifactError, match=said):
        Retrieve.load(tmp_path)


@pytest.mark.parametrize("width", [TASTE, TASTE + 2])
def test_user_vectors_of_another_width_are_refused(tmp_path, width):
    write_folder(tmp_path)
    stage, inputs = Retrieve.load(tmp_path), requests()
    history = stage.items.find_positions(inputs["history_ids"])
    with pytest.raises(ArtifactError, match=f"user vectors are {width} wide; expected {TASTE + 1}"):
        stage.outputs.find_candidates(inputs, history, np.ones((len(history), width), np.float32))
