"""[merlin] of the export's settings: the repository's path in the container, and how it is served there."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

PROFILE_NAME = "merlin"  # in a manifest, and of the settings section


class MerlinSettings(BaseModel):
    """Serving of the merlin profile. The tables' budgets and updates are those of [tables], for HPS and for our own levels.

    preprocess = "nvtabular" serves NVTabular's own workflow model instead of the compiled plan. That puts a pickle into the
    repository (workflow.pkl), which runs code when it is loaded: serve such a repository only if you trust whoever wrote it.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    triton: Literal["24.03", "modern"] = "24.03"  # the Triton of merlin-hugectr:24.06, the last with HPS, or a current one
    mount: Annotated[str, Field(pattern="^/.*[^/]$")] = "/models"  # where the container sees the repository
    gpu: Annotated[int, Field(ge=0)] = 0  # number of the GPU that serves; the hps backend uses one for all instances
    cuda_graphs: bool = True  # launch the networks as recorded graphs
    precision: Literal["fp32", "fp16", "int8"] = "fp32"  # number format of ranker and re-ranker
    refresh_interval_s: Annotated[int, Field(ge=0)] = 0  # how often the GPU cache follows the databases; 0: never
    preprocess: Literal["compiled", "nvtabular"] = "compiled"  # what encodes the users' columns
    hugectr: bool = False  # also write the model for the older hugectr backend, into `<REPO>.hugectr`
