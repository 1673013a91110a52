"""[merlin] of the export's settings: where the repository will lie, and what the `hps` backend may use there."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from hps_config.description import Bytes, UpdateSection, VolatileSection


class MerlinSettings(BaseModel):
    """triton: "24.03" is that of merlin-hugectr:24.06, the last with HPS; "modern" is any current image, over our own tiers."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    triton: Literal["24.03", "modern"] = "24.03"
    mount: Annotated[str, Field(pattern="^/.*[^/]$")] = "/models"  # where the container sees the repository
    gpus: Annotated[list[int], Field(min_length=1, max_length=1)] = [0]  # hps serves all instances from the last one it lists
    cuda_graphs: bool = True
    gpu_cache: Bytes = Field(default="1 GiB", validate_default=True)  # rows in GPU memory
    host_memory: Bytes = Field(default="16 GiB", validate_default=True)  # of the volatile database; 0: none
    disk: Bytes = Field(default="0", validate_default=True)  # of RocksDB; 0: none
    rocksdb: str = "/var/lib/hps/rocksdb"  # in the container
    volatile: VolatileSection = VolatileSection()
    updates: UpdateSection = UpdateSection()
    hit_rate_threshold: Annotated[float, Field(ge=0)] = 1.1  # above 1: every answer is exact
    refresh_interval_s: Annotated[int, Field(ge=0)] = 0  # how often the GPU cache follows the databases; 0: never
    hugectr: bool = False  # also write the model for the older `hugectr` backend, beside the repository
