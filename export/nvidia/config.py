"""config.pbtxt of what only the merlin profile has: stages that are ensembles themselves, and the model of the `hps` backend.

Behind `hps` nothing has a batch axis: Triton refuses an ensemble that allows batches around a model that allows none. There
`rank` and `recommend` have max_batch_size 0 and the requests as the first of their dims, so callers send what they always sent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tritonclient.grpc import model_config_pb2 as pb

from export.merlin_settings import MerlinSettings
from export.nvidia.graph import FLAT
from export.nvidia.tensorrt.profiles import Profile, profiles_for
from repository.config import TRITON_TYPE, Serving, state_records
from serving.contract.tensors import ModelSpec
from serving.stages.parts.specs import (
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


def nested_config(spec: ModelSpec, steps: Sequence[ModelSpec], generation: int, max_batch_size: int) -> pb.ModelConfig:
    """-> a stage, or `recommend`, as an ensemble of `steps`, all pinned to `generation`."""
    config = ensemble(spec, generation, max_batch_size)
    for step in steps:
        entry = config.ensemble_scheduling.step.add(model_name=step.name, model_version=generation)
        for tensor in step.inputs:
            entry.input_map[tensor.name] = raw_tensor(tensor.name) if step.name == PREPROCESS_WORKFLOW else tensor.name
        for tensor in step.outputs:
            entry.output_map[tensor.name] = _edge(step.name, tensor.name)
    return config


def _edge(step: str, tensor: str) -> str:
    """-> the ensemble's tensor that a step's output becomes."""
    if step == PREPROCESS_WORKFLOW:  # which calls what it takes and what it gives alike
        return encoded_tensor(tensor)
    return {HPS_OUTPUT: FLAT}.get(tensor, tensor)


def ensemble(spec: ModelSpec, generation: int, max_batch_size: int) -> pb.ModelConfig:
    """-> an ensemble without steps. max_batch_size 0: the dims begin with the requests."""
    config = pb.ModelConfig(name=spec.name, platform="ensemble", max_batch_size=max_batch_size)
    rows = () if max_batch_size else (-1,)
    for tensor in spec.inputs:
        dims = (*rows, *tensor.dims)
        config.input.add(name=tensor.name, data_type=TRITON_TYPE[tensor.dtype], dims=dims, optional=tensor.optional)
    for tensor in spec.outputs:
        config.output.add(name=tensor.name, data_type=TRITON_TYPE[tensor.dtype], dims=(*rows, *tensor.dims))
    state_records(config, spec)
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
