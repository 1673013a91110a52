"""Run a merlin repository's own ensembles in this process, from its own files: slow, exact, without a server.

python     the stages and their parts           hps         the sparse folder that ps.json names, read back
ensemble   its steps, as config.pbtxt wires them   tensorrt    model.onnx by ONNX Runtime, rounded as its types say
                                                   workflow    NVTabular, by merlin-systems' own runner

The export rehearses a repository with it before publishing, and `make check` compares recorded answers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from export.nvidia.hps import PS_FILE
from export.nvidia.precision.faithful import open_faithful_session
from export.nvidia.tensorrt.build_engines import ENGINE_FILE
from hps_config.reader import read_ps_json
from repository.triton.config import CONFIG_FILE, compare_tensors, read_spec
from repository.triton.models import read_config
from serving.contract.artifacts import open_network, read_json, verify_manifest
from serving.contract.errors import ArtifactError, RequestError
from serving.contract.tensors import ENSEMBLE, ModelSpec, pack_records, unpack_records
from serving.stages.parts.models import PART_TYPES, RankFeatures, RankRows
from serving.stages.parts.specs import HPS_OUTPUT, KEYS, PREPROCESS_WORKFLOW, RANK_EMBEDDINGS, RANK_ROWS
from serving.stages.preprocess import Preprocess
from serving.tables.formats.sparse_folder import read_sparse_folder

Arrays = dict[str, np.ndarray]
Run = Callable[[Arrays], Arrays]
NETWORK = "model"  # .onnx, in the version folder of a TensorRT model


class MerlinPipeline:
    """The ensembles of one generation. mount: the path of the repository in the container, as in ps.json."""

    def __init__(self, repository: Path, generation: int, mount: str) -> None:
        """Load every model. Raises ArtifactError or ConfigError when a file is missing or differs from the published one."""
        self.repository, self.generation, self.mount = repository, generation, mount
        self.configs = {path.parent.name: read_config(path) for path in sorted(repository.glob(f"*/{CONFIG_FILE}"))}
        self._runs = {name: self._open_model(name, config) for name, config in self.configs.items()}

    def __call__(self, inputs: Mapping[str, np.ndarray]) -> Arrays:
        """Return the outputs of `recommend` for one batch. Raises RequestError for the first malformed row."""
        return self._runs[ENSEMBLE](dict(inputs))

    def trace(self, inputs: Mapping[str, np.ndarray]) -> dict[str, Arrays]:
        """Return the inputs of every model but the ensembles, by model and tensor, records unpacked into their fields."""
        recorded: dict[str, Arrays] = {}
        models = {name: run for name, run in self._runs.items() if not self.configs[name].HasField("ensemble_scheduling")}
        recording = {name: _record_inputs(read_spec(self.configs[name]), run, recorded) for name, run in models.items()}
        self._runs |= recording
        try:
            self(inputs)
        finally:
            self._runs |= models
        return recorded

    def _open_model(self, name: str, config: Any) -> Run:
        folder = self.repository / name / str(self.generation)
        if config.platform == "ensemble":
            return lambda tensors: self._run_ensemble(config, tensors)
        if config.backend == "hps":
            return _Lookup(self.repository, self.mount)
        if (folder / ENGINE_FILE).is_file():  # not by the config: the start script may have put a stand-in's in its place
            network = _open_network(folder)
            outputs = [tensor.name for tensor in config.output]
            return lambda tensors: dict(zip(outputs, network.run(outputs, tensors), strict=True))
        verify_manifest(folder)
        if name in PART_TYPES:
            stage = RankRows.load(folder, as_exported=True) if name == RANK_ROWS else PART_TYPES[name].load(folder)
            return _make_stage_run(stage, require_same_tensors(stage.spec, config))
        if name == PREPROCESS_WORKFLOW:
            from export.nvidia.workflow import make_workflow_run  # only now: NVTabular takes seconds to import

            return make_workflow_run(folder)
        if name == "preprocess":
            stage = Preprocess.load(folder)
            return _make_stage_run(stage, require_same_tensors(stage.info.spec, config))
        raise ArtifactError(f"{self.repository} has the model {name}, which no export writes. Move it out of the repository.")

    def _run_ensemble(self, config: Any, tensors: Arrays) -> Arrays:
        arrays = dict(tensors)
        for step in config.ensemble_scheduling.step:
            inputs = {name_in_step: arrays[source] for name_in_step, source in step.input_map.items() if source in arrays}
            outputs = self._runs[step.model_name](inputs)
            arrays |= {target: outputs[name_in_step] for name_in_step, target in step.output_map.items()}
        return {tensor.name: arrays[tensor.name] for tensor in config.output}


class _Lookup:
    """The `hps` model: rows of the table by key, and the default value for unknown keys."""

    def __init__(self, repository: Path, mount: str) -> None:
        params = read_ps_json(repository / PS_FILE).find_model(RANK_EMBEDDINGS)
        folder = map_to_host(repository, mount, params.sparse_files[0])
        table = read_sparse_folder(folder, params.embedding_vecsize_per_table[0])
        order = np.argsort(table.keys)
        self.keys, self.vectors = np.asarray(table.keys)[order], np.asarray(table.vectors)[order]
        self.default = np.float32(params.default_value_for_each_table[0])

    def __call__(self, tensors: Arrays) -> Arrays:
        keys = tensors[KEYS][0]
        positions = np.minimum(np.searchsorted(self.keys, keys), len(self.keys) - 1)
        is_known = (self.keys[positions] == keys)[:, None]
        return {HPS_OUTPUT: np.where(is_known, self.vectors[positions], self.default).ravel()}


def _open_network(folder: Path) -> Any:
    """Return a session that answers as the engine will. ONNX Runtime by itself does not round where fp16 does."""
    session = open_network(folder, NETWORK)
    if read_json(folder, ENGINE_FILE)["precision"] == "fp32":
        return session
    return open_faithful_session(onnx.load(str(folder / f"{NETWORK}.onnx")))


def map_to_host(repository: Path, mount: str, path: str) -> Path:
    """Return the path on this machine of a path in the container. Raises ArtifactError when it is outside of the mount."""
    inside = Path(path)
    if not inside.is_relative_to(mount):
        raise ArtifactError(
            f"{repository / PS_FILE} names {path}, outside of {mount}, where the repository is mounted. Export it again."
        )
    return repository / inside.relative_to(mount)


def require_same_tensors(spec: ModelSpec, config: Any) -> ModelSpec:
    """Return `spec`. Raises ArtifactError when config.pbtxt, which the other models are wired by, states other tensors."""
    if differing := compare_tensors(config, spec):
        raise ArtifactError(
            f"{spec.name}/{CONFIG_FILE} and the code of this checkout state different tensors: {differing}. "
            "Use the checkout that exported the repository, or export again."
        )
    return spec


def _make_stage_run(stage: Any, spec: ModelSpec) -> Run:
    def run(tensors: Arrays) -> Arrays:
        batch = len(next(iter(tensors.values())))
        inputs = unpack_records(spec.inputs, spec.fill_optional(batch) | tensors)
        if faults := stage.find_faults(inputs):
            raise RequestError(faults[min(faults)])
        outputs = pack_records(spec.outputs, inputs | stage(inputs))
        return RankFeatures.flatten_keys(outputs) if isinstance(stage, RankFeatures) else outputs

    return run


def _record_inputs(spec: ModelSpec, run: Run, recorded: dict[str, Arrays]) -> Run:
    def run_and_record(tensors: Arrays) -> Arrays:
        recorded[spec.name] = unpack_records(tuple(t for t in spec.inputs if t.name in tensors), tensors)
        return run(tensors)

    return run_and_record
