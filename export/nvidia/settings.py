"""[merlin] of the export's settings: where the repository will lie, and how it is served there.

Budgets of the tables, their update source and the hit-rate threshold are those of [tables], whichever tiers serve them.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

PROFILE_NAME = "merlin"  # in a manifest, and of the settings section


class MerlinSettings(BaseModel):
    """triton: "24.03" is that of merlin-hugectr:24.06, the last with HPS; "modern" is any current image, over our own tiers.

    preprocess: "nvtabular" serves NVTabular's own workflow model instead of the compiled plan. That puts a pickle into the
    repository (workflow.pkl), which runs code when it is loaded: serve such a repository only if you trust whoever wrote it.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    triton: Literal["24.03", "modern"] = "24.03"
    mount: Annotated[str, Field(pattern="^/.*[^/]$")] = "/models"  # where the container sees the repository
    gpu: Annotated[int, Field(ge=0)] = 0  # one: the hps backend serves all instances from the last one it is given
    cuda_graphs: bool = True
    precision: Literal["fp32", "fp16", "int8"] = (
        "fp32"  # of the ranker's and the re-ranker's networks (export/nvidia/precision)
    )
    refresh_interval_s: Annotated[int, Field(ge=0)] = 0  # how often the GPU cache follows the databases; 0: never
    preprocess: Literal["compiled", "nvtabular"] = "compiled"  # what encodes the users' columns
    hugectr: bool = False  # also write the model for the older `hugectr` backend, into <REPO>.hugectr
