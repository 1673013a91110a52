"""Check a merlin repository for `make check`: find what NVIDIA's backends would refuse or answer wrongly.

No backend is started. BY_FORMAT_ONLY lists facts that only a real backend can confirm: the checks compare the files with the
formats that the backends document.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from export.merlin_settings import PROFILE_NAME, MerlinSettings
from export.nvidia import hps_rules
from export.nvidia.hps import PS_FILE
from export.nvidia.parts import HPS, NVTABULAR, PYTHON, TENSORRT, WORKFLOW, list_models, list_parts
from export.nvidia.precision.agreement import describe_disagreement
from export.nvidia.publish import answer_recorded
from export.nvidia.tensorrt.checks import check_tensorrt_model
from hps_config.reader import check_ps_json, read_ps_json
from repository.checks.check import check_names, check_record, check_writers
from repository.checks.finding import Finding, count_errors
from repository.checks.recorded import RECORDED_FILE, read_recorded
from repository.triton import config_rules
from repository.triton.config import CONFIG_FILE
from repository.triton.models import read_config
from serving.contract.artifacts import MANIFEST_FILE, compute_sha256, describe_file, get_section, read_json, read_stage
from serving.contract.generations import read_pinned_generation
from serving.contract.tensors import ENSEMBLE
from serving.stages.parts.gpu_index import MOST_GPU_RESULTS
from serving.stages.parts.specs import (
    RANK_EMBEDDINGS,
    RANK_FEATURES,
    RETRIEVE_SEARCH,
    PartSettings,
    Sizes,
    count_keys_per_request,
)

AGAIN = "Export the repository again."
BY_FORMAT_ONLY = {
    HPS: (
        "that the hps backend loads ps.json and the sparse folder (both its parsers are modelled, the bytes read back)",
        "that hps caches, refreshes and consumes updates as config.pbtxt and ps.json state (by the rules of its source)",
    ),
    TENSORRT: (
        "that TensorRT builds and runs the engines (ONNX Runtime ran the networks; profiles and CUDA graphs were compared)",
    ),
    PYTHON: ("that Faiss takes the index to the GPU, and how much memory all of it needs there",),
}


def list_unconfirmed_facts(repository: Path) -> tuple[str, ...]:
    """Return the unconfirmed facts about the backends that serve this repository."""
    kinds = {part.kind for part in list_parts(read_merlin_settings(repository))}
    return tuple(fact for kind, facts in BY_FORMAT_ONLY.items() if kind in kinds for fact in facts)


def check_models(repository: Path) -> Iterator[Finding]:
    """Yield an error for each model that is missing, misnamed or unknown to this profile."""
    models = list_models(read_merlin_settings(repository))
    yield from check_names(repository, models)
    for path in sorted(repository.iterdir()):
        if path.is_dir() and path.name not in models:
            yield Finding("error", path.name, "The profile has no model of this name", "Move it out of the repository.")


def check_files(repository: Path) -> Iterator[Finding]:
    """Yield an error for each file that is missing or differs from the published one.

    TensorRT engines are not checked, because the serving machine builds them.
    """
    generation = read_pinned_generation(repository)
    published = repository / ENSEMBLE / str(generation)
    digests = get_section(read_json(published, MANIFEST_FILE), "stages", published)
    for name in (*digests, ENSEMBLE):
        folder = repository / name / str(generation)
        manifest = read_json(folder, MANIFEST_FILE)
        if manifest.get("generation") != generation or digests.get(name, "") not in (
            "",
            compute_sha256(folder / MANIFEST_FILE),
        ):
            yield make_error(f"{name}/{generation}", "It is not the one that this generation was published with")
        for file, fact in get_section(manifest, "files", folder).items():
            if not (folder / file).is_file() or describe_file(folder / file) != fact:
                yield make_error(f"{name}/{generation}/{file}", "It is missing or not the file that was published")


def check_ensembles(repository: Path) -> Iterator[Finding]:
    """Yield an error for each ensemble whose edges, batch sizes or versions do not match its models."""
    configs = {path.parent.name: read_config(path) for path in repository.glob(f"*/{CONFIG_FILE}")}
    generation = read_pinned_generation(repository)
    for name, config in sorted(configs.items()):
        for fact in config_rules.find_ensemble_faults(config, configs, generation):
            yield make_error(f"{name}/{CONFIG_FILE}", fact)


def check_hps(repository: Path) -> Iterator[Finding]:
    """Yield the findings of both ps.json parsers and of the backend's rules. Yield nothing for a repository without HPS."""
    settings = read_merlin_settings(repository)
    if not any(part.kind == HPS for part in list_parts(settings)):
        return
    findings = [
        Finding(each.level, f"{PS_FILE} {each.where}", each.fact, f"{each.remedy} {AGAIN}")
        for each in check_ps_json(repository / PS_FILE)
    ]
    yield from dict.fromkeys(findings)  # both parsers may report the same fault
    if count_errors(findings):
        return
    generation, config = read_pinned_generation(repository), read_config(repository / RANK_EMBEDDINGS / CONFIG_FILE)
    ps = read_ps_json(repository / PS_FILE)
    if ps.update_source.type != "null" and hps_rules.read_refresh_interval(config) == "0":
        fact = "refresh_interval is 0, and ps.json has an update_source: a row that the GPU has cached never changes"
        yield Finding("warning", f"{RANK_EMBEDDINGS}/{CONFIG_FILE}", fact, "Set [merlin] refresh_interval_s and export again.")
    if ps.volatile_db.type == "redis_cluster" and "," in ps.volatile_db.address:
        fact = f"volatile_db.address is {ps.volatile_db.address}; HPS asks only the first node; expected one that is always up"
        yield Finding("warning", PS_FILE, fact, "Put such a node first ([tables] redis) and export again.")
    if others := sorted({params.model for params in ps.models} - {RANK_EMBEDDINGS}):
        fact = f"It names the models {', '.join(others)}, which are not in this repository: HPS loads them all when it starts"
        yield Finding("warning", PS_FILE, fact, "Remove them from ps.json, or export again.")
    params = hps_rules.find_model(ps, RANK_EMBEDDINGS)
    if params is None:
        yield make_error(PS_FILE, f"It names no model {RANK_EMBEDDINGS!r}: the backend would not load it")
        return
    features = repository / RANK_FEATURES / str(generation)
    info = read_stage(features)
    features_part = PartSettings.of(features, info)
    most_requests = read_config(repository / RANK_FEATURES / CONFIG_FILE).max_batch_size
    facts = (
        *hps_rules.find_tensor_faults(config),
        *hps_rules.find_instance_faults(config, params),
        *hps_rules.find_refresh_faults(config, params),
        *hps_rules.find_table_faults(params, repository, settings.mount),
        *hps_rules.find_refresh_buffer_faults(config, params, repository, settings.mount),
        *hps_rules.find_key_faults(params, repository, settings.mount, features, features_part),
        *hps_rules.find_batch_faults(params, count_keys_per_request(info, Sizes(**features_part.sizes)), most_requests),
    )
    for fact in facts:
        yield make_error(f"{RANK_EMBEDDINGS}/{CONFIG_FILE}", fact)
    if len(params.sparse_files) == 1 and (
        fact := hps_rules.find_order_fault(params, repository, settings.mount, features, features_part)
    ):
        yield Finding("warning", f"{RANK_EMBEDDINGS}/{generation}", fact, AGAIN)


def check_wiring(repository: Path) -> Iterator[Finding]:
    """Yield an error where the ensemble `rank` feeds KEYS or NUMKEYS to the `hps` model in a form that it does not read."""
    configs = {path.parent.name: read_config(path) for path in repository.glob(f"*/{CONFIG_FILE}")}
    if RANK_EMBEDDINGS in configs:
        for fact in hps_rules.find_wiring_faults(configs["rank"], configs):
            yield make_error(f"rank/{CONFIG_FILE}", fact)


def check_configs(repository: Path) -> Iterator[Finding]:
    """Yield an error for each model with a wrong version, a missing model file or an unusable warm-up."""
    generation = read_pinned_generation(repository)
    for name in list_models(read_merlin_settings(repository)):
        config, folder = read_config(repository / name / CONFIG_FILE), repository / name
        facts = (
            *config_rules.find_version_faults(config, generation),
            *config_rules.find_model_file_faults(config, folder / str(generation)),
            *config_rules.find_warmup_faults(config, folder / "warmup"),
        )
        for fact in facts:
            yield make_error(f"{name}/{CONFIG_FILE}", fact)


def check_tensorrt(repository: Path) -> Iterator[Finding]:
    """Yield the findings of the TensorRT backend's rules for every network."""
    for part in list_parts(read_merlin_settings(repository)):
        if part.kind == TENSORRT:
            yield from check_tensorrt_model(repository / part.name)


def check_search(repository: Path) -> Iterator[Finding]:
    """Yield an error when the search needs more results than Faiss returns on a GPU."""
    candidates = read_stage(repository / RETRIEVE_SEARCH / str(read_pinned_generation(repository))).axes.candidates
    if candidates > MOST_GPU_RESULTS:
        yield make_error(RETRIEVE_SEARCH, f"{candidates} candidates; Faiss gives at most {MOST_GPU_RESULTS} on a GPU")


def check_pickles(repository: Path) -> Iterator[Finding]:
    """Yield a warning for each NVTabular workflow: it is a pickle, which runs code when it is loaded.

    `check_answers`, which runs later, loads it.
    """
    for part in list_parts(read_merlin_settings(repository)):
        if part.kind != NVTABULAR:
            continue
        fact = f"{WORKFLOW}/workflow.pkl is a pickle: it runs code when it is loaded"
        remedy = 'Serve it only if you trust whoever wrote it, or export with [merlin] preprocess = "compiled".'
        yield Finding("warning", f"{part.name}/{read_pinned_generation(repository)}", fact, remedy)


def check_answers(repository: Path) -> Iterator[Finding]:
    """Yield an error when the repository's own files answer recorded requests differently from the cpu profile."""
    generation = read_pinned_generation(repository)
    recorded = read_recorded(repository / ENSEMBLE / str(generation) / RECORDED_FILE)
    settings = read_merlin_settings(repository)
    if difference := describe_disagreement(
        settings.precision, answer_recorded(repository, generation, settings.mount), recorded.outputs
    ):
        yield make_error(f"{ENSEMBLE}/{generation}", f"Recorded requests are answered differently: {difference}")


def read_merlin_settings(repository: Path) -> MerlinSettings:
    """Return the settings that the repository was exported with."""
    folder = repository / ENSEMBLE / str(read_pinned_generation(repository))
    return MerlinSettings(**get_section(read_json(folder, MANIFEST_FILE), PROFILE_NAME, folder))


def make_error(where: str, fact: str) -> Finding:
    return Finding("error", where, fact, AGAIN)


CHECKS = (
    check_models,
    check_files,
    check_configs,
    check_ensembles,
    check_wiring,
    check_hps,
    check_tensorrt,
    check_search,
    check_pickles,
    check_writers,
    check_record,
    check_answers,
)
DECISIVE = (check_models, check_files, check_search)
