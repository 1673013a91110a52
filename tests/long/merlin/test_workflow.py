"""NVTabular itself in preprocess: what is written, what it reads, and that it encodes as the compiled plan does."""

import pickle
import runpy
import shutil
import sys

import numpy as np
import pandas as pd
import pytest
from nvtabular import Dataset, Workflow, ops
from rich.console import Console

from export.build import build_repository
from export.check import check_repository
from export.nvidia.pipeline import MerlinPipeline
from export.nvidia.precision.agreement import EXACT
from export.nvidia.publish import publish_merlin
from export.nvidia.workflow import make_workflow_run
from export.settings import Settings
from repository.checks.recorded import RECORDED_FILE, compare_answers, read_recorded
from repository.triton.models import read_config
from serving.contract.errors import ConfigError
from serving.contract.tensors import MISSING_INT
from serving.stages.features.encode import FIRST_ROW
from serving.stages.parts.preprocess import make_tensor
from serving.stages.preprocess import Preprocess
from tests.contract import fake_backend
from tests.long.merlin.conftest import source_of
from tests.unit.small_shops import SETTINGS, few_resamples
from training.dataset import load_dataset
from training.features.columns import make_frame
from training.features.compile import compile_workflow
from training.features.operators import Categories, HashValues
from training.features.workflow import save_for_serving

NVTABULAR = SETTINGS | {"merlin": {"preprocess": "nvtabular"}}
MODEL = "preprocess_workflow"


@pytest.fixture(scope="module")
def published(cpu, tmp_path_factory):
    """Return a merlin repository that serves NVTabular, and the cpu profile's repository of the same shop."""
    merlin = tmp_path_factory.mktemp("shop") / "merlin"
    settings, dataset = Settings.model_validate(NVTABULAR), load_dataset(cpu.parent / "data")
    with few_resamples():
        build_repository(dataset, merlin, settings, Console(quiet=True), profile="merlin")
    return merlin, cpu


@pytest.fixture
def repository(published, tmp_path):
    """Return a copy that a test may damage."""
    return shutil.copytree(published[0], tmp_path / "repository")


def test_it_encodes_as_the_compiled_plan_does(published):
    merlin, cpu = published
    recorded = read_recorded(cpu / "recommend" / "1" / RECORDED_FILE)
    pipeline = MerlinPipeline(merlin, 1, "/models")
    assert compare_answers(pipeline(recorded.inputs), recorded.outputs, EXACT) == ""
    given = pipeline.trace(recorded.inputs)
    stage = Preprocess.load(cpu / "preprocess" / "1")
    expected = stage(stage.info.spec.fill_optional(len(recorded.inputs["user_id"])) | recorded.inputs)
    np.testing.assert_array_equal(given["retrieve_features"]["user_categorical"], expected["user_categorical"])
    np.testing.assert_allclose(given["towers_user"]["user_continuous"], expected["user_continuous"], atol=1e-6)
    np.testing.assert_array_equal(given["retrieve_search"]["lineage"], expected["lineage"])


def test_missing_values_and_any_text_reach_it(tmp_path):
    """In single requests and in batches: NVTabular gets columns without any value, and merlin-systems reads ASCII only."""
    texts = np.array(["red", "weiß", "50%", "%41", "red", "A", None, "", "never seen", "weiß".encode()], object)
    columns = {
        "text": texts,
        "number": np.array([1, 2, 2**60, -5, 1, 7, MISSING_INT, 0, 3, 2]),
        "hashed": texts,
        "amount": np.array([0.5, np.nan, 3, -1, 2, 8, np.nan, 0, 1, 1e9]),
    }
    output = ["text", "number"] >> Categories(out_path=str(tmp_path))
    output = output + (["hashed"] >> HashValues({"hashed": 97}))
    output = output + (["amount"] >> ops.FillMissing(2.0) >> ops.Normalize(out_dtype=np.float32))
    workflow = Workflow(output).fit(Dataset(make_frame({name: values[:6] for name, values in columns.items()}), cpu=True))
    plan = compile_workflow(workflow)
    save_for_serving(workflow, tmp_path / "1" / "workflow")
    run = make_workflow_run(tmp_path / "1")
    for rows in (slice(None), *(slice(row, row + 1) for row in range(len(texts)))):
        got = run({name: make_tensor(values[rows]) for name, values in columns.items()})
        expected = plan({name: values[rows] for name, values in columns.items()})
        names = [column.name for column in plan.categorical]
        first = [FIRST_ROW if column.kind == "hash" else 0 for column in plan.categorical]
        rows_got = np.concatenate([got[name] for name in names], axis=1) + first
        np.testing.assert_array_equal(rows_got, expected.categorical)
        np.testing.assert_allclose(got["amount"], expected.continuous, rtol=1e-6)


def test_categorify_still_needs_its_stand_in(tmp_path):
    """This fault is the reason for Categories. When this test fails, NVTabular has corrected Categorify: remove ours."""
    frame = pd.DataFrame({"text": pd.Series(["a", None], dtype=object)})
    workflow = Workflow(["text"] >> ops.Categorify(out_path=str(tmp_path))).fit(Dataset(frame, cpu=True))
    with pytest.raises(RuntimeError, match="Failed to categorical encode column text"):
        workflow.transform(frame.iloc[1:])


def test_the_pickle_holds_no_code(published):
    """It only refers to classes, because the containers have another Python. Our only classes in it are the operators."""
    modules = set()

    class Reading(pickle.Unpickler):
        def find_class(self, module, name):
            modules.add(module)
            return super().find_class(module, name)

    with (published[0] / MODEL / "1" / "workflow" / "workflow.pkl").open("rb") as file:
        Reading(file).load()
    assert {module for module in modules if module.startswith(("export", "training"))} == {"training.features.operators"}
    assert not {module for module in modules if module.startswith("cloudpickle")}


def test_the_model_takes_batches_and_runs_on_the_host(published):
    config = read_config(published[0] / MODEL / "config.pbtxt")
    assert (config.name, config.max_batch_size, config.HasField("dynamic_batching")) == (MODEL, 64, False)
    assert all(list(tensor.dims) == [1] and tensor.HasField("reshape") for tensor in (*config.input, *config.output))
    assert config.instance_group[0].kind == config.instance_group[0].KIND_CPU


def test_make_check_says_that_there_is_a_pickle(published, repository):
    merlin, _ = published
    (finding,) = check_repository(merlin)
    assert (finding.level, finding.where) == ("warning", f"{MODEL}/1")
    assert "is a pickle" in finding.fact
    (repository / MODEL / "1" / "workflow" / "workflow.pkl").write_bytes(b"another")
    found = [f"{finding.where}: {finding.fact}" for finding in check_repository(repository) if finding.level == "error"]
    assert any("workflow.pkl: It is missing or not the file" in line for line in found)


def test_a_changed_pickle_is_never_opened(repository, monkeypatch):
    folder = repository / MODEL
    (folder / "1" / "workflow" / "workflow.pkl").write_bytes(b"cbuiltins\nexit\n.")
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", fake_backend)
    monkeypatch.setattr(sys, "path", list(sys.path))
    model = runpy.run_path(str(folder / "1" / "model.py"))["TritonPythonModel"]()
    with pytest.raises(fake_backend.TritonModelException, match=r"workflow\.pkl is not the file that was published"):
        model.initialize({"model_name": MODEL, "model_repository": str(folder), "model_version": "1"})


def test_a_generation_that_kept_no_workflow(cpu, tmp_path):
    settings = Settings.model_validate({"merlin": {"preprocess": "nvtabular"}})
    with pytest.raises(ConfigError, match="NVTabular's workflow was not kept"):
        publish_merlin(source_of(cpu), tmp_path / "repository", settings)
