"""Write a merlin repository, model by model."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import cached_property
from pathlib import Path

import onnx

from export.merlin_settings import PROFILE_NAME
from export.nvidia.config import list_preferred_sizes, make_hps_config, make_nested_config, make_profiles
from export.nvidia.graph import FLAT, fix_candidates, flatten_rows
from export.nvidia.hps import PS_FILE, read_uses, write_ps, write_table
from export.nvidia.index import read_index_bytes, write_gpu_index
from export.nvidia.parts import (
    NVTABULAR,
    PYTHON,
    TENSORRT,
    Part,
    list_models,
    list_nested_stages,
    list_parts,
    list_python_models,
)
from export.nvidia.pipeline import MerlinPipeline
from export.nvidia.precision.lower import Lowered, lower_networks
from export.nvidia.source import Source
from export.nvidia.tensorrt.config import make_tensorrt_config
from export.nvidia.tensorrt.model import Engine, write_configs, write_version
from export.settings import Settings
from hps_config.reader import read_ps_json
from repository.checks.recorded import RECORDED_FILE, read_recorded
from repository.generations import SEALED
from repository.triton.code import copy_serving_code
from repository.triton.config import CONFIG_FILE, WARMUP_ROWS, add_warmup, make_stage_config
from repository.triton.model_files import UPDATER, forbid_caches, write_warmup
from repository.triton.models import write_config
from serving.contract.artifacts import MANIFEST_FILE, compute_sha256, read_json, write_manifest
from serving.contract.errors import ConfigError
from serving.contract.tensors import ANY_GENERATION, ENSEMBLE, ModelSpec, make_ensemble_spec, new_lineage
from serving.stages.features.encode import Plan
from serving.stages.parts.gpu_index import SCRATCH_BYTES
from serving.stages.parts.models import PART_TYPES
from serving.stages.parts.specs import (
    PREPROCESS_WORKFLOW,
    RANK_DENSE,
    RANK_EMBEDDINGS,
    RANK_ROWS,
    RETRIEVE_SEARCH,
    PartSettings,
    WorkflowColumns,
    build_all_specs,
    count_keys_per_request,
    make_preprocess_specs,
)

MODEL_PY = '''"""Written by the exporter: serves the code in this folder."""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

from serving.stages.parts.models import {part}
from serving.stages.parts.triton import make_part_model

TritonPythonModel = make_part_model({part})
'''


class Writer:
    """Writes one repository into `target`, which must not exist."""

    def __init__(self, source: Source, target: Path, settings: Settings, report: Callable[[str], None] = print) -> None:
        self.source, self.target, self.settings, self.report = source, target, settings, report
        self.merlin, self.serving = settings.merlin, settings.merge_serving()
        self.uses_hps = self.merlin.triton == "24.03"
        self.parts = list_parts(self.merlin)
        self.specs = build_all_specs(source.info["rank"], source.sizes, self.uses_hps)
        self.first_keys: dict[str, int] = {}
        self.columns = WorkflowColumns()

    def write(self) -> None:
        """Write everything; no file is changed after it was written."""
        for name in list_models(self.merlin):
            self.make_version_folder(name).mkdir(parents=True)
        if self.uses_hps:
            self._write_hps_model()
        if self.merlin.preprocess == "nvtabular":
            self._write_workflow_model()
        else:
            self._write_preprocess()
        for part in self.parts:
            if part.kind == PYTHON:
                self._write_python_part(part)
            elif part.kind == TENSORRT:
                self._write_network_model(part)
        self._write_ensembles()
        self._write_recommend()
        self._write_warmup()

    def make_version_folder(self, model: str) -> Path:
        return self.target / model / str(self.source.generation)

    def find_max_batch_size(self, stage: str) -> int:
        """Return the max_batch_size of an ensemble or a network: 0 behind `hps`, which has no batch axis."""
        return 0 if self.uses_hps and stage in ("rank", ENSEMBLE) else self.serving[stage].max_batch_size

    def _write_hps_model(self) -> None:
        """Write the table, ps.json and the model of the `hps` backend."""
        source, serving, version = self.source, self.serving["rank"], self.make_version_folder(RANK_EMBEDDINGS)
        tables = source.load_tables()
        uses = read_uses(source.folders["rank"], tables, tuple(source.info["rank"].settings["item_tables"]))
        self.first_keys = write_table(version, tables, uses)
        per_request = count_keys_per_request(source.info["rank"], source.sizes)
        write_ps(self.target / PS_FILE, self.settings, tables, per_request, source.generation, serving)
        config = make_hps_config(self.merlin, source.generation, serving.instances)
        write_config(self.target / RANK_EMBEDDINGS / CONFIG_FILE, config)
        write_manifest(version, generation=source.generation)

    def _write_preprocess(self) -> None:
        """Copy the cpu profile's model."""
        shutil.copytree(self.source.folders["preprocess"], self.make_version_folder("preprocess"), dirs_exist_ok=True)
        self._write_python_config(self.source.specs["preprocess"], "preprocess")

    def _write_workflow_model(self) -> None:
        """Write NVTabular's own workflow, and keep the columns that its neighbours need."""
        from export.nvidia.workflow import find_columns, write_workflow_model  # imported late: NVTabular takes seconds

        version = self.make_version_folder(PREPROCESS_WORKFLOW)
        if self.source.workflow is None:
            raise ConfigError("NVTabular's workflow was not kept. Expected its folder. Export from the data set.")
        config = write_workflow_model(self.source.workflow, version, self.serving["preprocess"])
        self.columns = find_columns(config, Plan.load(self.source.folders["preprocess"] / "plan"))
        self.specs |= make_preprocess_specs(self.source.info["preprocess"], self.columns)
        add_warmup(config, self.specs[PREPROCESS_WORKFLOW], WARMUP_ROWS)
        write_config(self.target / PREPROCESS_WORKFLOW / CONFIG_FILE, config)
        write_manifest(version, generation=self.source.generation)

    def _write_python_part(self, part: Part) -> None:
        """Write a part in Python: files of its stage, its code, a manifest."""
        info, folder, version = (
            self.source.info[part.stage],
            self.source.folders[part.stage],
            self.make_version_folder(part.name),
        )
        for path in sorted({path for pattern in part.files for path in folder.glob(pattern)}):
            copy = version / path.relative_to(folder)
            copy.parent.mkdir(exist_ok=True)
            shutil.copyfile(path, copy)
        settings = dict(info.settings)
        if part.name == RETRIEVE_SEARCH:
            settings["index"] = write_gpu_index(version, settings["index"])
        columns = asdict(self.columns) if part.stage == "preprocess" else {}
        part_settings = PartSettings(part.name, asdict(self.source.sizes), settings, self.first_keys, columns, self.merlin.gpu)
        replace(info, settings=asdict(part_settings)).write(version)
        copy_serving_code(version, ("serving.stages.parts.triton", *([UPDATER] if part.name == RANK_ROWS else ())))
        (version / "model.py").write_text(MODEL_PY.format(part=PART_TYPES[part.name].__name__))
        forbid_caches(version)
        write_manifest(version, stage=part.stage, generation=self.source.generation)
        self._write_python_config(self.specs[part.name], part.stage)

    def _write_python_config(self, spec: ModelSpec, stage: str) -> None:
        config = make_stage_config(spec, self.serving[stage], [self.source.generation], WARMUP_ROWS)
        write_config(self.target / spec.name / CONFIG_FILE, config)

    def _write_network_model(self, part: Part) -> None:
        """Write a network: ONNX file, profiles, configs. Its engine is built on the serving machine."""
        spec, serving, generation = self.specs[part.name], self.serving[part.stage], self.source.generation
        batch = self.find_max_batch_size(part.stage)
        per_row = {FLAT: count_keys_per_request(self.source.info["rank"], self.source.sizes) * self.source.sizes.row_width}
        profiles = make_profiles(spec, serving, batch, per_row)
        config = make_tensorrt_config(
            part.name,
            spec.inputs,
            spec.outputs,
            batch,
            profiles,
            versions=[generation],
            preferred_batch_sizes=list_preferred_sizes(serving),
            queue_delay_us=serving.queue_delay_us,
            instances=serving.instances,
            gpus=[self.merlin.gpu],
            cuda_graphs=self.merlin.cuda_graphs,
        )
        network = self.target / f"{part.name}.onnx"
        precision, fp32_nodes = self._write_network(part, network)
        write_version(self.make_version_folder(part.name), network, Engine(precision, profiles, fp32_nodes))
        network.unlink()
        write_configs(self.target / part.name, config)
        write_manifest(self.make_version_folder(part.name), generation=generation)

    def _write_network(self, part: Part, target: Path) -> tuple[str, tuple[str, ...]]:
        """Write the stage's ONNX file for this profile. Return its precision, and the nodes that TensorRT 8 keeps in fp32."""
        path, axes = self.source.folders[part.stage] / part.files[0], self.source.info[part.stage].axes
        lowered = self.lowered.get(part.stage) or Lowered(onnx.load(str(path)), "fp32")
        model = lowered.model
        fix_candidates(model, axes.candidates)
        onnx.save(model, str(target))
        if self.uses_hps and part.name == RANK_DENSE:
            sizes = self.source.sizes
            flatten_rows(target, target, axes.user_categorical, axes.candidates, sizes.item_tables, sizes.row_width)
        return lowered.precision, lowered.fp32_nodes

    @cached_property
    def lowered(self) -> dict[str, Lowered]:
        """Networks by stage, in the wanted precision as far as the recorded answers survive it."""
        return (
            {} if self.merlin.precision == "fp32" else lower_networks(self.source.folders, self.merlin.precision, self.report)
        )

    def _write_ensembles(self) -> None:
        for stage in list_nested_stages(self.merlin):
            steps = [self.specs[part.name] for part in self.parts if part.stage == stage]
            config = make_nested_config(
                self.source.specs[stage], steps, self.source.generation, self.find_max_batch_size(stage)
            )
            write_config(self.target / stage / CONFIG_FILE, config)
        stages = self.source.specs
        config = make_nested_config(
            make_ensemble_spec(stages), list(stages.values()), self.source.generation, self.find_max_batch_size(ENSEMBLE)
        )
        write_config(self.target / ENSEMBLE / CONFIG_FILE, config)

    def _write_recommend(self) -> None:
        """Copy what the cpu profile publishes with the ensemble, and write a manifest of every model of this repository."""
        folder, version = self.source.folders[ENSEMBLE], self.make_version_folder(ENSEMBLE)
        shutil.copytree(folder, version, dirs_exist_ok=True, ignore=shutil.ignore_patterns(MANIFEST_FILE))
        facts = {k: v for k, v in read_json(folder, MANIFEST_FILE).items() if k not in ("schema", "files", "stages")}
        with_manifest = [name for name in list_models(self.merlin) if (self.make_version_folder(name) / MANIFEST_FILE).exists()]
        digests = {name: compute_sha256(self.make_version_folder(name) / MANIFEST_FILE) for name in with_manifest}
        facts |= {
            "profile": PROFILE_NAME,
            PROFILE_NAME: self.merlin.model_dump(mode="json"),
            "stages": digests,
            SEALED: round(time.time(), 3),
            "gpu_memory_bytes": self._plan_gpu_memory(),
        }
        write_manifest(version, **facts)

    def _plan_gpu_memory(self) -> dict[str, int]:
        """Return GPU bytes that are known in advance: HPS's cached rows, the index and its scratch space per instance.

        TensorRT's contexts come on top: their need is known once the engines are built.
        """
        planned = {"search_index": read_index_bytes(self.make_version_folder(RETRIEVE_SEARCH)), "search_scratch": SCRATCH_BYTES}
        if self.uses_hps:
            params = read_ps_json(self.target / PS_FILE).find_model(RANK_EMBEDDINGS)
            rows = sum(map(len, self.source.load_tables().values()))
            planned["hps_cache"] = int(rows * params.gpucacheper) * self.source.sizes.row_width * 4
        return planned

    def _write_warmup(self) -> None:
        """Write warm-up requests for every Python model: recorded ones, traced through the written repository."""
        recorded = read_recorded(self.make_version_folder(ENSEMBLE) / RECORDED_FILE)
        pipeline = MerlinPipeline(self.target, self.source.generation, self.merlin.mount)
        traced = pipeline.trace({name: values[:WARMUP_ROWS] for name, values in recorded.inputs.items()})
        specs = self.source.specs | self.specs
        workflows = [part.name for part in self.parts if part.kind == NVTABULAR]
        for spec in (specs[name] for name in (*list_python_models(self.merlin), *workflows)):
            lineage = {"lineage": new_lineage(WARMUP_ROWS, ANY_GENERATION)}
            tensors = spec.fill_optional(WARMUP_ROWS) | traced[spec.name] | lineage
            write_warmup(self.target / spec.name / "warmup", spec, tensors, WARMUP_ROWS)
