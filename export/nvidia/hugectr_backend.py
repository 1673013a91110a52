"""The ranker as a model of the `hugectr` backend (merlin-hugectr images up to 23.08), in a repository of its own.

<REPO>.hugectr/ps.json                                       as that backend's own parser reads it
<REPO>.hugectr/rank_hugectr/config.pbtxt
<REPO>.hugectr/rank_hugectr/<generation>/rank_hugectr.json   network, and beside it the dense file and the sparse folder

One sample is one (user, candidate) pair: the whole DLRM runs behind one model, and its caller sends `pair_tensors`.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from tritonclient.grpc import model_config_pb2 as pb

from export.nvidia.folders import replace_folder
from export.nvidia.hps import PS_FILE, read_uses
from export.nvidia.hugectr.layers import DlrmLayers, make_layers
from export.nvidia.hugectr.model import write_model
from export.nvidia.source import Source
from export.settings import Settings
from repository.triton.models import write_config
from serving.contract.errors import ExportError
from serving.stages.rank import LAYERS_FILE

NAME = "rank_hugectr"
REQUIRED = (  # hugectr.cc: the parser fails without them
    "model",
    "network_file",
    "dense_file",
    "sparse_files",
    "max_batch_size",
    "deployed_device_list",
    "default_value_for_each_table",
    "maxnum_catfeature_query_per_table_per_sample",
    "embedding_vecsize_per_table",
)
REQUIRED_WITH_CACHE = ("hit_rate_threshold", "gpucacheper")


def write_hugectr_repository(source: Source, target: Path, settings: Settings) -> None:
    """Write the repository beside `target`, then put it in the place of an older one.

    Raises ExportError when `target` is a folder that no export wrote, or the backend would refuse the repository.
    """
    refuse_foreign(target)
    rank = source.folders["rank"]
    layers = read_layers(rank / LAYERS_FILE)
    entry = make_ps_entry(source, layers, settings)
    config = make_backend_config(source, layers, settings, entry)
    if faults := [*find_entry_faults(entry), *find_config_faults(config, entry)]:
        raise ExportError(f"The hugectr backend would not serve {NAME}: {'; '.join(faults)}. Report this as a bug.")
    tables = source.load_tables()
    uses = read_uses(rank, tables, tuple(source.info["rank"].settings["item_tables"]))
    volatile = {"type": "parallel_hash_map", "num_partitions": 8}
    document = {"supportlonglong": True, "volatile_db": volatile, "models": [entry]}
    target = target.resolve()  # replace a link's target, not the link
    building = target.parent / f".{target.name}.building"
    shutil.rmtree(building, ignore_errors=True)
    try:
        write_model(building / NAME / str(source.generation), NAME, layers, tables, dict.fromkeys(tables, 1), uses)
        (building / PS_FILE).write_text(json.dumps(document, indent=1) + "\n")
        write_config(building / NAME / "config.pbtxt", config)
        replace_folder(building, target)
    finally:
        shutil.rmtree(building, ignore_errors=True)


def refuse_foreign(target: Path) -> None:
    """Raise ExportError when `target` holds anything but an exported repository, because it would be removed."""
    if not target.exists():
        return
    names = {path.name for path in target.iterdir()} if target.is_dir() else {target.name}
    if names and names != {PS_FILE, NAME}:
        raise ExportError(
            f"{target} holds {', '.join(sorted(names))}, and [merlin] hugectr = true writes {PS_FILE} and {NAME} "
            "in its place. Move it away, or export into another REPO."
        )


def read_layers(path: Path) -> DlrmLayers:
    """Read the ranker's weights."""
    with np.load(path, allow_pickle=False) as file:
        return make_layers({name: file[name] for name in file.files})


def make_ps_entry(source: Source, layers: DlrmLayers, settings: Settings) -> dict[str, Any]:
    """Return the model's entry in ps.json (`models[0]`)."""
    merlin, serving = settings.merlin, settings.merge_serving()["rank"]
    slots = len(source.table_names)
    folder = f"{merlin.mount}/{NAME}/{source.generation}"
    return {
        "model": NAME,
        "network_file": f"{folder}/{NAME}.json",
        "dense_file": f"{folder}/{NAME}_dense_0.model",
        "sparse_files": [f"{folder}/{NAME}0_sparse_0.model"],
        "embedding_table_names": ["sparse_embedding"],
        "embedding_vecsize_per_table": [layers.width],
        "maxnum_catfeature_query_per_table_per_sample": [slots],
        "maxnum_des_feature_per_sample": layers.dense_dim,
        "default_value_for_each_table": [0.0],
        "slot_num": slots,
        "label_dim": 1,
        "max_batch_size": serving.max_batch_size * source.info["rank"].axes.candidates,
        "deployed_device_list": [merlin.gpu],
        "num_of_worker_buffer_in_pool": max(2, serving.instances),
        "num_of_refresher_buffer_in_pool": 1,
        "cache_refresh_percentage_per_iteration": 0.2,
        "gpucache": True,
        "gpucacheper": 1.0,
        "hit_rate_threshold": settings.tables.hit_rate_threshold,
    }


def make_backend_config(source: Source, layers: DlrmLayers, settings: Settings, entry: dict[str, Any]) -> pb.ModelConfig:
    """Return the model's config. entry: what `make_ps_entry` returned"""
    merlin, serving = settings.merlin, settings.merge_serving()["rank"]
    slots = len(source.table_names)
    config = pb.ModelConfig(name=NAME, backend="hugectr", max_batch_size=entry["max_batch_size"])
    for name, kind in (("DES", pb.TYPE_FP32), ("CATCOLUMN", pb.TYPE_INT64), ("ROWINDEX", pb.TYPE_INT32)):
        config.input.add(name=name, data_type=kind, dims=[-1])
    config.output.add(name="OUTPUT0", data_type=pb.TYPE_FP32, dims=[-1])
    config.version_policy.specific.versions.append(source.generation)
    config.instance_group.add(kind=pb.ModelInstanceGroup.KIND_GPU, count=serving.instances, gpus=[merlin.gpu])
    parameters = {
        "config": entry["network_file"],
        "gpucache": "true",
        "hit_rate_threshold": entry["hit_rate_threshold"],
        "gpucacheper": entry["gpucacheper"],
        "label_dim": 1,
        "slots": slots,
        "des_feature_num": layers.dense_dim,
        "cat_feature_num": slots,
        "max_nnz": 1,
        "embedding_vector_size": layers.width,
        "embeddingkey_long_type": "true",
    }
    for name, value in parameters.items():
        config.parameters[name].string_value = str(value)
    return config


def find_entry_faults(entry: dict[str, Any]) -> Iterator[str]:
    """Yield the keys that the backend's parser requires and the entry lacks."""
    needed = (*REQUIRED, *(REQUIRED_WITH_CACHE if entry.get("gpucache", True) else ()))
    for name in needed:
        if name not in entry:
            yield f"ps.json lacks {name}, and its parser stops there"


def find_config_faults(config: pb.ModelConfig, entry: dict[str, Any]) -> Iterator[str]:
    """Yield the differences that the backend finds between config.pbtxt and ps.json."""
    if config.max_batch_size != entry.get("max_batch_size"):
        yield f"max_batch_size is {config.max_batch_size}, in ps.json {entry.get('max_batch_size')}; they must be equal"
    tensors = [(tensor.name, tensor.data_type, list(tensor.dims)) for tensor in config.input]
    expected = [("DES", pb.TYPE_FP32, [-1]), ("CATCOLUMN", pb.TYPE_INT64, [-1]), ("ROWINDEX", pb.TYPE_INT32, [-1])]
    if tensors != expected:
        yield f"the inputs are {tensors}, expected {expected}"
    for group in config.instance_group:
        if group.kind != pb.ModelInstanceGroup.KIND_GPU or not set(group.gpus) <= set(entry.get("deployed_device_list", [])):
            yield "an instance_group is not KIND_GPU on GPUs of deployed_device_list"
        if (group.count or 1) > entry.get("num_of_worker_buffer_in_pool", 1):
            yield f"{group.count} instances share {entry.get('num_of_worker_buffer_in_pool', 1)} worker buffers"
    if (config.parameters["gpucache"].string_value == "true") != entry.get("gpucache", True):
        yield "gpucache differs from ps.json"
    for name in REQUIRED_WITH_CACHE:
        if float(config.parameters[name].string_value or 0) > entry.get(name, 0):
            yield f"{name} is above that of ps.json"


def pair_tensors(numbers: np.ndarray, keys: np.ndarray) -> dict[str, np.ndarray]:
    """Return the model's inputs. numbers: float32 [N, Gu + Gp]; keys: int64 [N, S], one per slot, first key of the slot added.

    DES and CATCOLUMN go sample by sample; ROWINDEX counts the keys of each slot of each sample, from 0.
    """
    rows = np.arange(keys.size + 1, dtype=np.int32)
    return {
        "DES": numbers.astype(np.float32).reshape(1, -1),
        "CATCOLUMN": keys.astype(np.int64).reshape(1, -1),
        "ROWINDEX": rows.reshape(1, -1),
    }
