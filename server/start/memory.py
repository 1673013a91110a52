"""Estimate a server's memory before it starts, so that it is refused early instead of killed late.

The estimate should be right within a factor of two. It adds up the server, one Python process per model instance,
memory-mapped arrays once (instances share their pages), and every other file once per instance.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import psutil

from repository.triton.models import Model
from serving.contract.errors import ServerError

MiB = 1 << 20
SERVER_BYTES = 200 * MiB
INSTANCE_BYTES = 150 * MiB  # numpy, onnxruntime and faiss take 95 MiB of a stub; the rest is for sessions and batches
SHARED_SUFFIXES = {".npy"}  # mapped by serving/contract/artifacts.py::open_array
INSTANCE_SHM_BYTES = 2 * MiB  # the Python backend's shared memory region, as it starts
CGROUP = Path("/sys/fs/cgroup")
CGROUP_FILES = (  # limit, usage, statistics, and its field for inactive file pages; cgroup version 2, then version 1
    ("memory.max", "memory.current", "memory.stat", "inactive_file"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_inactive_file"),
)


@dataclass(frozen=True)
class Need:
    """Memory that one server needs, in bytes."""

    ram: int
    shm: int
    instances: int  # Python processes


def estimate_need(models: list[Model]) -> Need:
    """Estimate what a server with these models needs."""
    ram, instances = SERVER_BYTES, 0
    for model in models:
        for version in model.versions_loaded:
            files = [path for path in (model.folder / str(version)).rglob("*") if path.is_file()]
            shared = sum(path.stat().st_size for path in files if path.suffix in SHARED_SUFFIXES)
            private = sum(path.stat().st_size for path in files if path.suffix not in SHARED_SUFFIXES)
            ram += shared + model.instances * (private + INSTANCE_BYTES)
            instances += model.instances
    return Need(ram, instances * INSTANCE_SHM_BYTES, instances)


def measure_available_bytes(cgroup: Path = CGROUP) -> int:
    """Return the bytes free for a new process: the machine's, or the container's when that is less."""
    machine = psutil.virtual_memory().available
    for limit_file, used_file, stat_file, cache_field in CGROUP_FILES:
        try:
            limit, used = ((cgroup / name).read_text().strip() for name in (limit_file, used_file))
            stat = (cgroup / stat_file).read_text()
        except OSError:
            continue
        fields = dict(line.split() for line in stat.splitlines())
        # Inactive file pages (an export has just written its arrays) are reclaimed before the limit applies; `docker stats`
        # excludes them too.
        held_bytes = max(int(used) - int(fields.get(cache_field, 0)), 0)
        return machine if limit == "max" else min(machine, max(int(limit) - held_bytes, 0))
    return machine


def check_memory(models: list[Model], ram_bytes: int | None = None, shm_bytes: int | None = None) -> Need:
    """Return the need of `models`. Raises ServerError when they will not fit; available bytes are measured unless passed."""
    need = estimate_need(models)
    ram_bytes = measure_available_bytes() if ram_bytes is None else ram_bytes
    shm_bytes = shutil.disk_usage("/dev/shm").free if shm_bytes is None else shm_bytes
    if need.ram > ram_bytes:
        raise ServerError(
            f"This repository needs about {need.ram / MiB:,.0f} MiB of memory ({need.instances} model instances), and "
            f"{ram_bytes / MiB:,.0f} MiB are available. Lower the instance counts, free memory, or use a larger machine."
        )
    if need.shm > shm_bytes:
        raise ServerError(
            f"/dev/shm has {shm_bytes / MiB:,.0f} MiB free, and {need.instances} model instances need about "
            f"{need.shm / MiB:,.0f} MiB. In a container, start it with a larger one (docker run --shm-size=1g)."
        )
    return need
