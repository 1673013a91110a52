"""Breaking a copy of a merlin repository, and what `make check` then calls an error."""

from __future__ import annotations

import json

from export.check import check_repository
from hps_config.parsers import load_json
from repository.triton.models import read_config, write_config

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
