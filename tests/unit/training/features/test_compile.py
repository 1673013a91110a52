"""Compiled plans against NVTabular itself, on random tables; and the operators that are refused."""

import numpy as np
import pandas as pd
import pytest
from nvtabular import Dataset, Workflow, ops

from serving.contract.errors import ExportError
from serving.contract.tensors import MISSING_INT, OOV_ROW
from serving.stages.features.encode import FIRST_ROW, CategoryColumn, NumberColumn, Ragged
from training.features.columns import RawColumn, make_frame
from training.features.compile import compile_workflow
from training.features.operators import Categories
from training.features.parity import draw_hard_sample, replay, transform
from training.features.rows import MemoryRows
from training.features.schema import Bins, Category, FeatureSettings, Number, Side
from training.features.workflow import HashValues, fit_workflow


def random_table(rng: np.random.Generator) -> dict:
    """One column of each kind, with odd ranges, missing values and heavy tails, different for every seed."""
    n_rows = int(rng.integers(30, 600))
    scale = 10.0 ** rng.integers(0, 19)
    ids = rng.integers(-5, 40, n_rows) * int(min(scale, 2**57)) + int(rng.integers(0, 2**60))
    words = np.array(["", "a", "b c", "é", "nan", "None", "123", "x" * 300, *map(str, range(20))], object)
    texts = words[rng.integers(0, len(words), n_rows)]
    texts[rng.random(n_rows) < 0.1] = None
    counts = rng.integers(0, 4, n_rows)
    return {
        "id": ids,
        "gappy": np.where(rng.random(n_rows) < 0.3, MISSING_INT, rng.integers(0, 9, n_rows)),
        "text": texts,
        "list": Ragged(words[rng.integers(1, len(words), counts.sum())], np.concatenate([[0], np.cumsum(counts)])),
        "skewed": np.where(rng.random(n_rows) < 0.2, np.nan, rng.lognormal(0, 3, n_rows)),
        "signed": np.where(rng.random(n_rows) < 0.2, np.nan, rng.normal(1e6, 1.0, n_rows)),
        "constant": np.full(n_rows, 4.25),
    }


def random_side(rng: np.random.Generator) -> Side:
    counts = rng.integers(0, 9, 4).tolist()
    return Side(
        categories=(
            Category("id", "integer", counts[0]),
            Category("gappy", "integer", counts[1]),
            Category("text", "string", counts[2]),
        ),
        bins=(Bins("skewed_bin", "skewed", (0.0, 0.5, 2.0)), Bins("signed_bin", "signed", (999_999.0, 1e6))),
        numbers=(Number("skewed"), Number("signed", 0.0), Number("constant")),
        lists=(Category("list", "list", counts[3]),),
    )


@pytest.mark.parametrize("seed", range(4))
def test_plan_equals_nvtabular_on_random_tables(seed, tmp_path):
    rng = np.random.default_rng(seed)
    columns, side = random_table(rng), random_side(rng)
    settings = FeatureSettings(hash_above=int(rng.integers(3, 60)), hash_buckets=17)
    workflow = fit_workflow(side, MemoryRows(make_frame(columns), tmp_path), settings)
    plan = compile_workflow(workflow)
    report = replay(workflow, plan, columns, rng)
    encoded: tuple[CategoryColumn | NumberColumn, ...] = (*plan.categorical, *plan.continuous, *plan.lists)
    assert report["columns"].keys() == {column.name for column in encoded}
    assert len(report["columns"]) == 9
    assert report["max_difference"] <= 1e-6
    assert report["rows"] >= 400


def test_reserved_rows_and_first_row_are_nvtabulars(tmp_path):
    """PAD_ROW, NULL_ROW, OOV_ROW and the most frequent value, read off NVTabular's own output."""
    frame = make_frame({"c": np.array([7, 7, 7, 8, 8, MISSING_INT])})
    workflow = Workflow(["c"] >> ops.Categorify(out_path=str(tmp_path)))
    workflow.fit(Dataset(frame, cpu=True))
    asked: dict[str, RawColumn] = {"c": np.array([7, 8, 9, MISSING_INT])}
    assert transform(workflow, asked)["c"].tolist() == [FIRST_ROW, FIRST_ROW + 1, OOV_ROW, 1]
    assert compile_workflow(workflow)(asked).categorical[:, 0].tolist() == [FIRST_ROW, FIRST_ROW + 1, OOV_ROW, 1]


@pytest.mark.parametrize(
    "values", [np.repeat(np.arange(200), 3), np.repeat(np.array([f"é{n:03}" for n in range(200)], object), 3)]
)
def test_equally_frequent_values_are_in_their_own_order(values, tmp_path):
    shuffled = np.random.default_rng(0).permutation(values)
    frame = make_frame({"c": np.append(shuffled, [values[-1], values[0]])})  # two values are more frequent
    workflow = Workflow(["c"] >> Categories(out_path=str(tmp_path))).fit(Dataset(frame, cpu=True))
    expected = [*values[[0, -1]], *values[3:-3:3]]
    encoded = compile_workflow(workflow)({"c": np.array(expected, values.dtype)})
    assert encoded.categorical[:, 0].tolist() == list(range(FIRST_ROW, FIRST_ROW + 200))
    assert transform(workflow, {"c": np.array(expected, values.dtype)})["c"].tolist() == encoded.categorical[:, 0].tolist()


def test_a_threshold_that_drops_every_value_leaves_the_reserved_rows(tmp_path):
    columns = {"text": np.array(["a", "b", None], object), "id": np.array([1, 2, 3])}
    side = Side((Category("text", "string", 9), Category("id", "integer", 9)), (), ())
    workflow = fit_workflow(side, MemoryRows(make_frame(columns), tmp_path), FeatureSettings())
    plan = compile_workflow(workflow)
    replay(workflow, plan, columns, np.random.default_rng(0))
    assert plan.rows == {"text": FIRST_ROW, "id": FIRST_ROW}
    assert plan(columns).categorical.tolist() == [[OOV_ROW, OOV_ROW], [OOV_ROW, OOV_ROW], [1, OOV_ROW]]


def test_a_column_without_any_value_is_left_out(tmp_path):
    columns = {"id": np.array([1, 1, 2]), "text": np.array([None, "", None], object), "x": np.full(3, np.nan)}
    side = Side((Category("id", "integer", 0), Category("text", "string", 0)), (Bins("b", "x", (0.0,)),), (Number("x"),))
    plan = compile_workflow(fit_workflow(side, MemoryRows(make_frame(columns), tmp_path), FeatureSettings()))
    assert [column.name for column in plan.categorical] == ["id"]
    assert plan.continuous == ()


def test_own_hash_bucket_of_nvtabular_depends_on_the_row_and_ours_does_not():
    """This fault is the reason for HashValues. When this test fails, NVTabular has corrected HashBucket: remove ours."""
    frame = pd.DataFrame({"h": np.full(50, 12345)})
    theirs = Workflow(["h"] >> ops.HashBucket({"h": 1000})).fit(Dataset(frame, cpu=True)).transform(frame)
    ours = Workflow(["h"] >> HashValues({"h": 1000})).fit(Dataset(frame, cpu=True)).transform(frame)
    assert theirs["h"].nunique() > 1
    assert ours["h"].nunique() == 1


def test_a_hash_does_not_depend_on_the_other_rows():
    """By default, pandas hashes distinct values, and takes texts that are equal up to a zero byte for one."""
    texts = np.array(["a", "a\0b", "a\0c", "", "\0"], object)
    columns: dict[str, RawColumn] = {"h": texts}
    workflow = Workflow(["h"] >> HashValues({"h": 1000})).fit(Dataset(make_frame(columns), cpu=True))
    expected = compile_workflow(workflow)(columns).categorical[:, 0] - FIRST_ROW
    assert len(set(expected)) == len(texts)
    assert transform(workflow, columns)["h"].tolist() == expected.tolist()


def fitted(graph, **columns) -> Workflow:
    workflow = Workflow(graph)
    workflow.fit(Dataset(pd.DataFrame(columns), cpu=True))
    return workflow


NUMBERS = np.array([1.0, 2.0, 3.0])
WORDS = np.array(["a", "b", "a"], object)


@pytest.mark.parametrize(
    ("graph", "message"),
    [
        (lambda path: ["x"] >> ops.NormalizeMinMax(), "NormalizeMinMax of 'x'"),
        (lambda path: ["x"] >> ops.LambdaOp(lambda x: x + 1), "UDF of 'x'"),
        (lambda path: ["x"] >> ops.HashBucket({"x": 10}), "HashBucket of 'x'"),
        (lambda path: ["x"] >> ops.FillMissing(0, add_binary_cols=True), "FillMissing makes the new column 'x_filled'"),
        (lambda path: ["x"] >> ops.Normalize() >> ops.Clip(0), "Normalize >> Clip of 'x'"),
        (lambda path: ["x"] >> ops.Clip(0) >> ops.Clip(1), "Clip >> Clip of 'x'"),
        (lambda path: ["x"] >> ops.LogOp() >> ops.Bucketize([1.0]), "LogOp or Normalize before Bucketize of 'x'"),
        (lambda path: ["x"] >> ops.Categorify(out_path=path), "Categorify of 'x' holds float64"),
        (lambda path: ["w"] >> ops.Categorify(out_path=path, max_size=5), "uses max_size"),
        (lambda path: ["w"] >> ops.Categorify(out_path=path, max_size=9, num_buckets=2), "uses num_buckets"),
        (lambda path: [["w", "v"]] >> ops.Categorify(out_path=path), "uses storage_name"),
        (lambda path: ["x"] >> ops.FillMissing(0) >> HashValues({"x": 9}), "FillMissing before HashValues of 'x'"),
        (lambda path: ["x"] >> ops.Rename(name="y") >> ops.Normalize(), "Normalize after Rename to 'y'"),
        (lambda path: ["w"] >> ops.Rename(name="y") >> Categories(out_path=path), "Categories after Rename to 'y'"),
        (lambda path: ["l"] >> ops.Normalize(), "The list 'l' cannot be compiled for serving without Categorify"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_what_cannot_be_compiled_is_named(graph, message, tmp_path):
    workflow = fitted(graph(str(tmp_path)), x=NUMBERS, w=WORDS, v=WORDS, l=[[1.0], [2.0, 3.0], []])
    with pytest.raises(ExportError, match=message):
        compile_workflow(workflow)


def test_a_plan_that_disagrees_is_refused(tmp_path):
    columns = {"x": NUMBERS, "id": np.array([1, 1, 2])}
    side = Side((Category("id", "integer", 0),), (), (Number("x"),))
    workflow = fit_workflow(side, MemoryRows(make_frame(columns), tmp_path / "a"), FeatureSettings())
    other = {"x": NUMBERS, "id": np.array([5, 2, 2])}
    for wrong, name in (({**columns, "x": NUMBERS * 2}, "x"), (other, "id")):
        plan = compile_workflow(fit_workflow(side, MemoryRows(make_frame(wrong), tmp_path / name), FeatureSettings()))
        with pytest.raises(ExportError, match=f"disagrees with NVTabular about '{name}'"):
            replay(workflow, plan, columns, np.random.default_rng(0))
    rows = MemoryRows(make_frame(columns), tmp_path)
    partial = compile_workflow(fit_workflow(Side((), (), (Number("x"),)), rows, FeatureSettings()))
    with pytest.raises(ExportError, match="The plan lacks id"):
        replay(workflow, partial, columns, np.random.default_rng(0))


def test_hard_sample_holds_a_value_in_every_column():
    gappy = np.full(5_000, MISSING_INT)
    gappy[-1] = 3
    texts = np.full(5_000, None, object)
    texts[2_500] = "only"
    sample = draw_hard_sample({"gappy": gappy, "texts": texts}, np.random.default_rng(0))
    assert 3 in sample["gappy"]
    assert "only" in sample["texts"]
