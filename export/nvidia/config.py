"""Make config.pbtxt of the models that only the merlin profile has: stages as ensembles, and the model of the `hps` backend.

Triton refuses an ensemble that batches if one of its models does not. The `hps` model has no batch axis. So the ensembles
around it, `rank` and `recommend`, have max_batch_size 0, and the first of their dims counts requests. Callers send the same
tensors either way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tritonclient.grpc import model_config_pb2 as pb

from export.merlin_settings import MerlinSettings
from export.nvidia.graph import FLAT
from export.nvidia.tensorrt.profiles import Profile, make_shape_profiles
from repository.triton.config import TRITON_TYPE, Serving, write_record_fields
from serving.contract.tensors import ModelSpec
from serving.stages.parts.specs import (
    HPS_OUTPUT,
    KEYS,
    NUMKEYS,
    PREPROCESS_WORKFLOW,
    RANK_EMBEDDINGS,
    name_encoded_tensor,
    name_raw_tensor,
)

TUNED_BATCHES = (8, 32)  # for engines without preferred sizes: their batches may have any size


def make_hps_config(settings: MerlinSettings, generation: int, instances: int) -> pb.ModelConfig:
    """Return the config of `rank_embeddings`, with the names, types and dims that the backend requires. It never batches."""
    config = pb.ModelConfig(name=RANK_EMBEDDINGS, backend="hps", max_batch_size=0)
    config.input.add(name=KEYS, data_type=pb.TYPE_INT64, dims=[-1, -1])
    config.input.add(name=NUMKEYS, data_type=pb.TYPE_INT32, dims=[-1, -1])
    config.output.add(name=HPS_OUTPUT, data_type=pb.TYPE_FP32, dims=[-1])
    config.version_policy.specific.versions.append(generation)
    config.instance_group.add(kind=pb.ModelInstanceGroup.KIND_GPU, count=instances, gpus=[settings.gpu])
    config.parameters["refresh_interval"].string_value = str(settings.refresh_interval_s)
    return config


def make_nested_config(spec: ModelSpec, steps: Sequence[ModelSpec], generation: int, max_batch_size: int) -> pb.ModelConfig:
    """Return the config of a stage, or of `recommend`, as an ensemble of `steps`, all pinned to `generation`."""
    config = make_ensemble(spec, generation, max_batch_size)
    for step in steps:
        entry = config.ensemble_scheduling.step.add(model_name=step.name, model_version=generation)
        for tensor in step.inputs:
            entry.input_map[tensor.name] = name_raw_tensor(tensor.name) if step.name == PREPROCESS_WORKFLOW else tensor.name
        for tensor in step.outputs:
            entry.output_map[tensor.name] = _name_edge(step.name, tensor.name)
    return config


def _name_edge(step: str, tensor: str) -> str:
    """Return the ensemble's name for a step's output tensor."""
    if step == PREPROCESS_WORKFLOW:  # its inputs and outputs share their names
        return name_encoded_tensor(tensor)
    return FLAT if tensor == HPS_OUTPUT else tensor


def make_ensemble(spec: ModelSpec, generation: int, max_batch_size: int) -> pb.ModelConfig:
    """Return the config of an ensemble without steps. max_batch_size 0: the dims begin with the requests."""
    config = pb.ModelConfig(name=spec.name, platform="ensemble", max_batch_size=max_batch_size)
    rows = () if max_batch_size else (-1,)
    for tensor in spec.inputs:
        dims = (*rows, *tensor.dims)
        config.input.add(name=tensor.name, data_type=TRITON_TYPE[tensor.dtype], dims=dims, optional=tensor.optional)
    for tensor in spec.outputs:
        config.output.add(name=tensor.name, data_type=TRITON_TYPE[tensor.dtype], dims=(*rows, *tensor.dims))
    write_record_fields(config, spec)
    config.version_policy.specific.versions.append(generation)
    return config


def list_preferred_sizes(serving: Serving) -> list[int]:
    """Return the batch sizes that Triton's batcher aims at: those of the settings, none by default (see `Serving`)."""
    return [size for size in serving.preferred_batch_sizes if size <= serving.max_batch_size]


def make_profiles(spec: ModelSpec, serving: Serving, max_batch_size: int, per_row: Mapping[str, int]) -> tuple[Profile, ...]:
    """Return a network's profiles; each accepts every batch of the settings. max_batch_size 0: see `make_shape_profiles`.

    Without a batch axis one profile is enough: the backend takes every request for one row when it compares the tuned shapes.
    """
    default = [size for size in TUNED_BATCHES if size <= serving.max_batch_size]
    tuned = (list_preferred_sizes(serving) or default) if max_batch_size else ()
    return make_shape_profiles(spec.inputs, max_batch_size, tuned, serving.max_batch_size, per_row)
