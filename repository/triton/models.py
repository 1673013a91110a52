"""Read a model repository as tritonserver does: models, parsed configs, and the versions that a start loads."""

from __future__ import annotations

import contextlib
import os
import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from repository.owner import copy_owner
from serving.contract.artifacts import MANIFEST_FILE, REMEDY, compute_sha256, find_stage_folder, get_section, read_json
from serving.contract.errors import ArtifactError, ConfigError
from serving.contract.generations import read_pinned_generation
from serving.contract.tensors import CHALLENGER, ENSEMBLE, LIVE_MODELS, STAGES

# tritonserver 2.51 puts paths unquoted into the shell command that starts a model's process, which reads them as ASCII
SERVABLE_PATH = re.compile(r"[A-Za-z0-9_./@%+=:,~#-]+")


@dataclass(frozen=True)
class Model:
    name: str
    folder: Path
    config: model_config_pb2.ModelConfig

    @property
    def is_ensemble(self) -> bool:
        return self.config.platform == "ensemble"

    @property
    def versions_on_disk(self) -> tuple[int, ...]:
        return tuple(sorted(int(entry.name) for entry in self.folder.iterdir() if entry.is_dir() and entry.name.isdecimal()))

    @property
    def versions_loaded(self) -> tuple[int, ...]:
        """Versions on disk that the version policy admits (Triton's default: the latest one)."""
        policy, on_disk = self.config.version_policy, self.versions_on_disk
        if policy.HasField("all"):
            return on_disk
        if policy.HasField("specific"):
            return tuple(v for v in on_disk if v in policy.specific.versions)
        return on_disk[-(policy.latest.num_versions or 1) :]

    @property
    def instances(self) -> int:
        """Instances per version; each instance of a Python model is a process of its own."""
        return 0 if self.is_ensemble else sum(group.count or 1 for group in self.config.instance_group) or 1

    @property
    def has_priorities(self) -> bool:
        """Whether some instances have priority over others in the config."""
        return any(group.rate_limiter.priority for group in self.config.instance_group)


def read_config(path: Path) -> model_config_pb2.ModelConfig:
    """Read the model configuration in a file. The caller may change it. Raises ArtifactError."""
    config = model_config_pb2.ModelConfig()
    try:
        config.CopyFrom(parse_config(path.read_text()))
    except FileNotFoundError:
        raise ArtifactError(
            f"{path} is missing; every folder in a repository is a model and needs one. Move other folders out of it, or "
            "publish again with `make export`."
        ) from None
    except (text_format.ParseError, UnicodeDecodeError) as error:
        raise ArtifactError(
            f"{path} is not a model configuration: {error}. Publish the repository again with `make export`."
        ) from error
    return config


@lru_cache(maxsize=128)  # a check reads the config of a model up to ten times, and parsing is most of what it costs
def parse_config(text: str) -> model_config_pb2.ModelConfig:
    return text_format.Parse(text, model_config_pb2.ModelConfig())


def write_config(path: Path, config: model_config_pb2.ModelConfig) -> None:
    """Replace a config atomically. The caller must hold the publication lock, or the folder must be its own.

    The draft is outside of the model folder, because tritonserver reads everything in it. The next one takes the place of what
    a kill leaves.
    """
    draft = path.parents[1] / f".{path.parent.name}.config.pbtxt"
    draft.unlink(missing_ok=True)  # it may be of another user
    with draft.open("w") as file:
        file.write(text_format.MessageToString(config))
        file.flush()
        os.fsync(file.fileno())
    copy_owner(draft, path.parent)
    draft.replace(path)


def refuse_unservable_path(folder: Path) -> None:
    """Raise ConfigError when tritonserver cannot start a model's process from `folder`, after following links."""
    path = str(folder.resolve())
    if not SERVABLE_PATH.fullmatch(path):
        odd = "".join(sorted(set(SERVABLE_PATH.sub("", path))))
        raise ConfigError(
            f"The path {path!r} holds {odd!r}, and no model starts from there. Expected a path of a-z, A-Z, 0-9 and "
            "_ . / @ % + = : , ~ # - only: tritonserver passes it unquoted to a shell. Move the folder below a plain path; "
            "a symbolic link is followed to where it points and does not help."
        )


def read_repository(repo: Path, with_challenger: bool = True) -> list[Model]:
    """Return the models of `repo`, sorted by name.

    with_challenger: False to leave the model `challenger` out, whose generation may be gone

    Raises ConfigError when there is none or its path cannot be served, ArtifactError for an unreadable or empty model.
    """
    refuse_unservable_path(repo)
    if not repo.is_dir():
        raise ConfigError(
            f"There is no model repository at {repo}. Make one with `make export REPO={repo}`, or pass another REPO=…."
        )
    folders = sorted(entry for entry in repo.iterdir() if entry.is_dir() and (with_challenger or entry.name != CHALLENGER))
    models = [Model(folder.name, folder, read_config(folder / "config.pbtxt")) for folder in folders]
    if not models:
        raise ConfigError(f"The model repository {repo} holds no model. Fill it with `make export REPO={repo}`.")
    for model in models:
        if not model.versions_loaded:
            remedy = f"Publish the repository again with `make export REPO={repo}`."
            if model.name == CHALLENGER:
                remedy = f"End its experiment: python -m server experiment stop --repo {repo}"
            raise ArtifactError(
                f"Model {model.name} has no version to load: {list(model.versions_on_disk)} on disk in {model.folder}, and its "
                f"version_policy admits none of them. {remedy}"
            )
    return models


def hash_manifest(repo: Path, generation: int | None) -> str:
    """Return the SHA-256 of the manifest of a generation, "" where there is no manifest. generation: None for the pinned one"""
    with contextlib.suppress(ArtifactError, FileNotFoundError):
        return compute_sha256(repo / ENSEMBLE / str(generation or read_pinned_generation(repo)) / MANIFEST_FILE)
    return ""


def read_published_digests(repo: Path, generation: int) -> dict[Path, str]:
    """Return the manifests of a generation's stages and live models -> the SHA-256 that each was published with, "" for none.

    Empty for a generation that this project did not publish. Raises ArtifactError when its own manifest cannot be read.
    """
    folder = repo / ENSEMBLE / str(generation)
    if not (folder / MANIFEST_FILE).is_file() or "stages" not in (manifest := read_json(folder, MANIFEST_FILE)):
        return {}
    digests = get_section(manifest, "stages", folder)
    paths = {name: find_stage_folder(repo, name, generation) / MANIFEST_FILE for name in (*STAGES, *LIVE_MODELS, *digests)}
    return {path: digests.get(name, "") for name, path in paths.items() if name in digests or path.is_file()}


def refuse_changed_manifests(repo: Path, generation: int) -> None:
    """Raise ArtifactError when a manifest is not the published one: stages compare their files with it when they load."""
    for path, digest in read_published_digests(repo, generation).items():
        if not path.is_file() or compute_sha256(path) != digest:
            raise ArtifactError(
                f"{path} is not the manifest that generation {generation} was published with, so the files beside it may be "
                f"others, too. {REMEDY}"
            )


def check_backends(models: list[Model]) -> None:
    """Raise ConfigError for models that need another backend than Python, the only one in the wheel's tritonserver.

    Raises ArtifactError for a config that names none.
    """
    for model in models:
        if not (model.config.backend or model.config.platform):
            raise ArtifactError(
                f"{model.folder / 'config.pbtxt'} names no backend; expected one in every config. It is cut short, as by a "
                "copy that a full disk ended. Copy the repository again, or publish it again with `make export`."
            )
    foreign = {model.name: model.config.backend or model.config.platform for model in models}
    foreign = {name: backend for name, backend in foreign.items() if backend not in ("python", "ensemble")}
    if foreign:
        needed = ", ".join(sorted(set(foreign.values())))
        raise ConfigError(
            f"The models {', '.join(sorted(foreign))} need the backends {needed}, and the tritonserver installed here has the "
            "Python backend only. Serve this repository in NVIDIA's container: deploy/README.md."
        )
