"""config.pbtxt of what only the merlin profile has: stages that are ensembles themselves, and the model of the `hps` backend.

Behind `hps` nothing has a batch axis: Triton refuses an ensemble that allows batches around a model that allows none. There
`rank` and `recommend` have max_batch_size 0 and the requests as the first of their dims, so callers send what they always sent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tritonclient.grpc import model_config_pb2 as pb

from export.merlin.graph import FLAT
from export.merlin.settings import MerlinSettings
from export.repository.config import TRITON_TYPE, Serving, chained
from export.tensorrt.profiles import Profile, profiles_for
from stages.contract import STAGES, ModelSpec, TensorSpec, ensemble_spec
from stages.steps.specs import (
    HPS_OUTPUT,
    KEYS,
    NUMKEYS,
    PREPROCESS_WORKFLOW,
    RANK_EMBEDDINGS,
    encoded_tensor,
    raw_tensor,
)

TUNED_BATCHES = (8, 32)  # for engines without preferred sizes: the batcher hands on whatever has come together


def hps_config(settings: MerlinSettings, generation: int, instances: int) -> pb.ModelConfig:
    """-> `rank_embeddings`: the names, types and dims that the backend demands, and never a dynamic batch."""
    config = pb.ModelConfig(name=RANK_EMBEDDINGS, backend="hps", max_batch_size=0)
    config.input.add(name=KEYS, data_type=pb.TYPE_INT64, dims=[-1, -1])
    config.input.add(name=NUMKEYS, data_type=pb.TYPE_INT32, dims=[-1, -1])
    config.output.add(name=HPS_OUTPUT, data_type=pb.TYPE_FP32, dims=[-1])
    config.version_policy.specific.versions.append(generation)
    config.instance_group.add(kind=pb.ModelInstanceGroup.KIND_GPU, count=instances, gpus=[settings.gpu])
    config.parameters["refresh_interval"].string_value = str(settings.refresh_interval_s)
    return config


def nested_config(stage: ModelSpec, steps: Sequence[ModelSpec], generation: int, max_batch_size: int) -> pb.ModelConfig:
    """-> a stage as an ensemble of `steps`, all pinned to `generation`.

    Only the last step hands the lineage on, as `<stage>_lineage`: an ensemble whose input and output share a name silently
    answers with the input.
    """
    outputs = tuple(TensorSpec(outside(stage.name, t.name), t.dtype, t.dims) for t in stage.outputs)
    config = ensemble(ModelSpec(stage.name, stage.inputs, outputs), generation, max_batch_size)
    produced = {tensor.name for step in steps[:-1] for tensor in step.outputs}
    for step in steps:
        entry = config.ensemble_scheduling.step.add(model_name=step.name, model_version=generation)
        for tensor in step.inputs:
            entry.input_map[tensor.name] = _source(step.name, tensor.name, step is steps[-1], produced)
        for tensor in step.outputs:
            last = step is steps[-1]
            entry.output_map[tensor.name] = outside(stage.name, tensor.name) if last else _edge(step.name, tensor.name)
    return config


def _source(step: str, tensor: str, last: bool, produced: set[str]) -> str:
    """-> the ensemble's tensor that feeds a step's input."""
    if step == PREPROCESS_WORKFLOW:
        return raw_tensor(tensor)
    if last and tensor == "lineage" and "tables_lineage" in produced:
        return "tables_lineage"
    return {"user_numbers": "user_continuous"}.get(tensor, tensor)


def _edge(step: str, tensor: str) -> str:
    """-> the ensemble's tensor that a step's output becomes."""
    if step == PREPROCESS_WORKFLOW:
        return encoded_tensor(tensor)
    return {HPS_OUTPUT: FLAT}.get(tensor, tensor)


def outside(stage: str, tensor: str) -> str:
    """-> what a stage calls its output: the lineage begins in the first one, which has no input of that name."""
    return tensor if stage == STAGES[0] else chained(stage, tensor)


def recommend_config(stages: dict[str, ModelSpec], generation: int, max_batch_size: int) -> pb.ModelConfig:
    """-> `recommend` over stages whose lineage is named after them."""
    config = ensemble(ensemble_spec(stages), generation, max_batch_size)
    for position, name in enumerate(STAGES):
        step = config.ensemble_scheduling.step.add(model_name=name, model_version=generation)
        for tensor in stages[name].inputs:
            step.input_map[tensor.name] = chained(STAGES[position - 1], tensor.name)
        for tensor in stages[name].outputs:
            step.output_map[outside(name, tensor.name)] = chained(name, tensor.name)
    return config


def ensemble(spec: ModelSpec, generation: int, max_batch_size: int) -> pb.ModelConfig:
    """-> an ensemble without steps. max_batch_size 0: the dims begin with the requests."""
    config = pb.ModelConfig(name=spec.name, platform="ensemble", max_batch_size=max_batch_size)
    rows = () if max_batch_size else (-1,)
    for tensor in spec.inputs:
        dims = (*rows, *tensor.dims)
        config.input.add(name=tensor.name, data_type=TRITON_TYPE[tensor.dtype], dims=dims, optional=tensor.optional)
    for tensor in spec.outputs:
        config.output.add(name=tensor.name, data_type=TRITON_TYPE[tensor.dtype], dims=(*rows, *tensor.dims))
    config.version_policy.specific.versions.append(generation)
    return config


def preferred_sizes(serving: Serving) -> list[int]:
    """-> the batch sizes that Triton's batcher is told to aim at: those of the settings, none by default (see `Serving`)."""
    return [size for size in serving.preferred_batch_sizes if size <= serving.max_batch_size]


def tensorrt_profiles(
    spec: ModelSpec, serving: Serving, max_batch_size: int, per_row: Mapping[str, int]
) -> tuple[Profile, ...]:
    """-> the profiles of a network: every batch the settings allow fits each of them. max_batch_size 0: see `profiles_for`."""
    usual = [size for size in TUNED_BATCHES if size <= serving.max_batch_size]
    tuned = preferred_sizes(serving) or usual
    return profiles_for(spec.inputs, max_batch_size, tuned, serving.max_batch_size, per_row)
