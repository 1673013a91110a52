"""A repository of empty stages, published as an export does."""

from repository.publish import Staging, hold_nothing
from repository.triton.config import Serving
from serving.contract.artifacts import (
    StageInfo,
)
from serving.contract.tensors import (
    ENSEMBLE,
    LIVE_MODELS,
    STAGES,
    Axes,
    make_stage_specs,
)

AXES = Axes(candidates=4, history=3, exclusions=2, items_returned=2, user_categorical=2, user_continuous=1)


SERVING = dict.fromkeys((*STAGES, *LIVE_MODELS, ENSEMBLE), Serving())


def recorded(specs, rows=4):
    tensors = {t.name: t for spec in specs.values() for t in (*spec.input_fields, *spec.output_fields)}
    return {name: t.make_filled(rows) for name, t in tensors.items()}


def publish_once(repository, axes=AXES, layout="fused", find_held=hold_nothing, keep=1):
    """layout: fused has a third of the files of the other one"""
    specs = make_stage_specs(axes)
    with Staging(repository, layout, find_held, keep) as staging:
        for name in STAGES:
            StageInfo(name, staging.generation, axes).write(staging.folder(name))
        staging.seal_stages(specs)
        staging.seal({"dataset": "none"})
        return staging.publish(specs, SERVING, recorded(specs))
