"""Breaking a copy of a merlin repository, and what `make check` then calls an error."""

from __future__ import annotations

import json

from export.check import check_repository
from hps_config.parsers import load_json
from repository.models import read_config, write_config
from serving.contract.artifacts import MANIFEST_FILE, compute_sha256, read_json, write_manifest

EMBEDDINGS = "rank_embeddings"


def errors(repository) -> str:
    return "\n".join(f"{f.where}: {f.fact}. {f.remedy}" for f in check_repository(repository) if f.level == "error")


def edit(repository, model: str, change) -> None:
    path = repository / model / "config.pbtxt"
    config = read_config(path)
    change(config)
    write_config(path, config)


def edit_ps(repository, **changes) -> None:
    """Keys of the model; None takes one out."""
    document = load_json(repository / "ps.json")
    document["models"][0] = {k: v for k, v in (document["models"][0] | changes).items() if v is not None}
    (repository / "ps.json").write_text(json.dumps(document))


def reseal(repository, model: str) -> None:
    """The manifests of what lies there now, as if it had been published so."""
    write_manifest(repository / model / "1", generation=1)
    own = repository / "recommend" / "1"
    facts = {k: v for k, v in read_json(own, MANIFEST_FILE).items() if k not in ("schema", "files")}
    facts["stages"][model] = compute_sha256(repository / model / "1" / MANIFEST_FILE)
    write_manifest(own, **facts)
