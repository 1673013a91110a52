"""NVTabular's own user workflow as a model: exported by merlin-systems 23.8, and run in this process for the rehearsal.

merlin-systems writes the saved workflow, config.pbtxt and model.py. We change three things: the batch axis (the exported model
has none, so no ensemble around it could batch), where it runs, and model.py, which verifies the manifest before it unpickles.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
from tritonclient.grpc import model_config_pb2 as pb

from export.nvidia.parts import WORKFLOW
from repository.triton.code import PROJECT, copy_serving_code, list_imports
from repository.triton.config import CONFIG_FILE, DTYPE, Serving
from repository.triton.model_files import forbid_caches
from repository.triton.models import read_config
from serving.contract.scratch import hold_scratch
from serving.stages.features.encode import FIRST_ROW, VOCABULARIES, Plan
from serving.stages.parts.specs import PREPROCESS_WORKFLOW, WorkflowColumns
from training.features.quiet_nvtabular import Workflow  # first: it silences the warnings of Merlin's imports

Arrays = dict[str, np.ndarray]
MODEL_PY = Path(__file__).with_name("workflow_model.py")  # not importable here: it needs tritonserver's modules
OPERATORS = PROJECT / "training" / "features" / "operators.py"


def write_workflow_model(saved: Path, version: Path, serving: Serving) -> pb.ModelConfig:
    """Write the model into its version folder.

    Return its config without a warm-up. saved: the workflow that `build_features` kept.
    """
    from merlin.systems.dag.ops.workflow import TransformWorkflow
    from merlin.systems.dag.runtimes.triton.ops.workflow import TransformWorkflowTriton

    with hold_scratch() as scratch:
        operator = TransformWorkflowTriton(TransformWorkflow(Workflow.load(saved)))
        operator.export(str(scratch), None, None)
        exported = scratch / operator.nvt_model_name
        shutil.copytree(exported / "1" / WORKFLOW, version / WORKFLOW)
        config = read_config(exported / CONFIG_FILE)
    shutil.copyfile(MODEL_PY, version / "model.py")
    publish_code(version)
    return with_batch_axis(config, int(version.name), serving)


def publish_code(version: Path) -> None:
    """Copy the operators that the pickle names, under the module names in the pickle."""
    copy_serving_code(version, [*list_imports(OPERATORS), *list_imports(MODEL_PY)])
    copy = version / OPERATORS.relative_to(PROJECT)
    copy.parent.mkdir(parents=True)
    for package in (copy.parent, copy.parent.parent):
        (package / "__init__.py").touch()
    shutil.copyfile(OPERATORS, copy)
    forbid_caches(version)


def with_batch_axis(config: pb.ModelConfig, generation: int, serving: Serving) -> pb.ModelConfig:
    """Return merlin-systems' config with its columns [B] declared as [B, 1].

    It runs request by request, without dynamic batching.
    """
    config.name, config.max_batch_size = PREPROCESS_WORKFLOW, serving.max_batch_size
    for tensor in (*config.input, *config.output):
        tensor.dims[:] = [1]
        tensor.reshape.SetInParent()  # [B, 1] -> [B]
    config.version_policy.specific.versions.append(generation)
    del config.instance_group[:]
    config.instance_group.add(kind=pb.ModelInstanceGroup.KIND_CPU, count=serving.instances)
    return config


def find_columns(config: pb.ModelConfig, plan: Plan) -> WorkflowColumns:
    """Return the workflow's inputs and outputs. plan: the compiled one, which has the order and the rows of the contract."""
    raw, encoded = ({tensor.name: DTYPE[tensor.data_type] for tensor in side} for side in (config.input, config.output))
    first_rows = {column.name: 0 if column.kind in VOCABULARIES else FIRST_ROW for column in plan.categorical}
    return WorkflowColumns(raw, encoded, first_rows, tuple(column.name for column in plan.continuous))


def make_workflow_run(version: Path) -> Callable[[Arrays], Arrays]:
    """Return a function that runs the model with merlin-systems' own runner, on the same tensors."""
    from merlin.systems.workflow.base import WorkflowRunner

    runner = WorkflowRunner(Workflow.load(version / WORKFLOW), {}, {"parameters": {}}, "CPU")

    def run(tensors: Arrays) -> Arrays:
        columns = {name: values[:, 0] for name, values in tensors.items()}
        texts = {name: values.astype("str") for name, values in columns.items() if values.dtype == object}
        return {name: values.reshape(-1, 1) for name, values in runner.run_workflow(columns | texts).items()}

    return run
