"""Turn a generation of the cpu profile into a merlin repository, rehearsed before it replaces the old one.

The whole repository is replaced, because the `hps` backend reads ps.json once, when the server starts, and knows one set of
tables per model name. So a new generation needs a restart, and a rollback needs another repository.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np

from export.merlin_settings import PROFILE_NAME
from export.nvidia.folders import replace_folder
from export.nvidia.hugectr_backend import refuse_foreign, write_hugectr_repository
from export.nvidia.pipeline import MerlinPipeline
from export.nvidia.precision.agreement import describe_disagreement
from export.nvidia.source import Source
from export.nvidia.write import Writer
from export.profiles import find_profile_name
from export.settings import Settings
from repository.checks.recorded import RECORDED_FILE, read_recorded
from repository.triton.config import CONFIG_FILE
from serving.contract.durable import make_file_system_durable
from serving.contract.errors import ConfigError, ExportError
from serving.contract.tensors import ENSEMBLE
from serving.stages.parts.gpu_index import MOST_GPU_RESULTS

BATCH = 32
README = "README.md"  # that of model_repository/ in a checkout; kept
MOST_NAMED = 5  # files of a foreign folder in a message


def publish_merlin(source: Source, repository: Path, settings: Settings, report: Callable[[str], None] = print) -> int:
    """Write the repository, rehearse it and put it in place. Return the generation.

    Raises ConfigError for settings that the backends do not accept, ExportError when the answers are not the cpu profile's.
    """
    refuse_int8(settings)
    refuse_places(repository, settings)
    refuse_long_lists(source)
    refuse_missing_workflow(source, settings)
    target = repository.resolve()  # replace a link's target, not the link
    building = target.parent / f".{target.name}.merlin"
    shutil.rmtree(building, ignore_errors=True)
    try:
        Writer(source, building, settings, report).write()
        rehearse(building, source.generation, settings.merlin.mount, settings.merlin.precision)
        if settings.merlin.hugectr:
            write_hugectr_repository(source, name_hugectr_folder(repository), settings)
        if (target / README).is_file():
            shutil.copyfile(target / README, building / README)
        make_file_system_durable(building)
        replace_folder(building, target)
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return source.generation


def refuse_int8(settings: Settings) -> None:
    """Raise ConfigError when the ranker is to be quantised for ONNX Runtime: TensorRT accepts zero points of 0 only."""
    if settings.compression == "int8":
        raise ConfigError(
            '[ranker] compression is "int8", a network for ONNX Runtime on a CPU, which TensorRT refuses. The merlin profile '
            'serves "none", "distilled" and "pruned". Set one of them, with [merlin] precision = "int8" for int8 in TensorRT, '
            "or export the cpu profile."
        )


def refuse_places(repository: Path, settings: Settings) -> None:
    """Raise ExportError when something else is in a place that this profile writes."""
    refuse_foreign_folder(repository)
    if settings.merlin.hugectr:
        refuse_foreign(name_hugectr_folder(repository))


def name_hugectr_folder(repository: Path) -> Path:
    """Return the folder of the model for the older `hugectr` backend."""
    return repository.with_name(f"{repository.name}.hugectr")


def refuse_foreign_folder(repository: Path) -> None:
    """Raise ExportError when `repository` holds anything but a merlin repository, because the whole folder is replaced."""
    if (repository / ENSEMBLE / CONFIG_FILE).is_file():
        if find_profile_name(repository) != PROFILE_NAME:
            raise ExportError(
                f"{repository} holds another profile. A merlin export replaces the whole repository: export into another REPO, "
                "or remove this one first."
            )
    elif repository.is_dir() and (names := sorted({path.name for path in repository.iterdir()} - {README})):
        raise ExportError(
            f"{repository} is no model repository: it holds {', '.join(names[:MOST_NAMED])}{' …' * (len(names) > MOST_NAMED)}. "
            "A merlin export replaces the whole folder: choose another REPO, an empty folder or a new name."
        )


def refuse_long_lists(source: Source) -> None:
    """Raise ConfigError when there are more candidates than Faiss returns on a GPU."""
    candidates = source.info["retrieve"].axes.candidates
    if candidates > MOST_GPU_RESULTS:
        raise ConfigError(
            f"[pipeline] candidates is {candidates}; Faiss gives at most {MOST_GPU_RESULTS} results on a GPU. Lower it, or "
            "export the cpu profile."
        )


def refuse_missing_workflow(source: Source, settings: Settings) -> None:
    """Raise ConfigError when NVTabular is to serve and its workflow was not kept: repositories hold only the compiled plan."""
    if settings.merlin.preprocess == "nvtabular" and source.workflow is None:
        raise ConfigError(
            '[merlin] preprocess is "nvtabular", and NVTabular\'s workflow was not kept when this generation was trained. '
            "Export from the data set (make export PROFILE=merlin)."
        )


def rehearse(repository: Path, generation: int, mount: str, precision: str = "fp32") -> None:
    """Send the recorded requests through the repository's own files.

    Raises ExportError unless the recorded answers come back, within what the precision promises.
    """
    recorded = read_recorded(repository / ENSEMBLE / str(generation) / RECORDED_FILE)
    if difference := describe_disagreement(precision, answer_recorded(repository, generation, mount), recorded.outputs):
        raise ExportError(
            f"The merlin profile and the cpu profile answer recorded requests differently: {difference}. Report this as a bug."
        )


def answer_recorded(repository: Path, generation: int, mount: str) -> dict[str, np.ndarray]:
    """Return the outputs of all recorded requests from the repository's own files."""
    inputs = read_recorded(repository / ENSEMBLE / str(generation) / RECORDED_FILE).inputs
    pipeline = MerlinPipeline(repository, generation, mount)
    starts = range(0, len(inputs["user_id"]), BATCH)
    parts = [pipeline({name: values[start : start + BATCH] for name, values in inputs.items()}) for start in starts]
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
