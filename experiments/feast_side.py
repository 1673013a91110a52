"""Feast's side of `python -m experiments.feast_layout`, run by the interpreter of an environment that has the real Feast.

    python feast_side.py ADDRESS PROJECT FOLDER

FOLDER/asked.json: entities for Feast to read, and rows for it to write. FOLDER/answered.json: what it read, and bytes that it
encoded. This file imports nothing of this project.
"""

from __future__ import annotations

import json
import sys
from datetime import UTC, datetime
from pathlib import Path

import pandas as pd
from feast import Entity, FeatureStore, FeatureView, Field, FileSource, RepoConfig, ValueType
from feast.infra.online_stores.helpers import _mmh3, _redis_key
from feast.protos.feast.types.EntityKey_pb2 import EntityKey
from feast.protos.feast.types.Value_pb2 import Value
from feast.types import Array, Bytes, Float32, Float64, Int64, String

TYPES = {
    "int64": Int64,
    "double": Float64,
    "bytes": Bytes,
    "int64_list": Array(Int64),
    "double_list": Array(Float64),
    "float_list": Array(Float32),
    "string_list": Array(String),
}


def open_store(address: str, project: str, folder: Path) -> FeatureStore:
    return FeatureStore(
        config=RepoConfig(
            project=project,
            registry=str(folder / "registry.db"),
            provider="local",
            online_store={"type": "redis", "redis_type": "redis_cluster", "connection_string": address},
            offline_store={"type": "file"},
            entity_key_serialization_version=3,
        )
    )


def define(store: FeatureStore, views: dict, folder: Path) -> None:
    """Register the feature views, as a shop would. views: name -> {"join_key", "features": {name: type}}"""
    for name, view in views.items():
        source = FileSource(path=str(folder / f"{name}.parquet"), timestamp_field="event_timestamp")
        columns = {view["join_key"]: [0], "event_timestamp": [datetime.now(UTC)]}
        pd.DataFrame(columns | {feature: [None] for feature in view["features"]}).to_parquet(source.path)
        entity = Entity(name=f"{name}_entity", join_keys=[view["join_key"]], value_type=ValueType.INT64)
        schema = [Field(name=feature, dtype=TYPES[kind]) for feature, kind in view["features"].items()]
        store.apply(
            [
                entity,
                FeatureView(
                    name=name,
                    entities=[entity],
                    schema=[Field(name=view["join_key"], dtype=Int64), *schema],
                    source=source,
                    online=True,
                    ttl=None,  # rows never expire
                ),
            ]
        )


def read(store: FeatureStore, name: str, view: dict, ids: list[int]) -> list[dict]:
    """Return feature -> value of each entity, read by Feast's own call."""
    features = [f"{name}:{feature}" for feature in view["features"]]
    rows = [{view["join_key"]: entity_id} for entity_id in ids]
    columns = store.get_online_features(features=features, entity_rows=rows).to_dict()
    return [{feature: columns[feature][row] for feature in view["features"]} for row in range(len(ids))]


def write(store: FeatureStore, name: str, view: dict, rows: list[dict]) -> None:
    frame = pd.DataFrame(rows)
    frame["event_timestamp"] = [datetime.now(UTC)] * len(rows)
    store.write_to_online_store(name, frame[[view["join_key"], *view["features"], "event_timestamp"]])


def make_vectors(project: str, views: dict, samples: dict) -> dict:
    """Return the bytes that Feast itself writes for keys, fields and values."""
    key = EntityKey(join_keys=["user_id"], entity_values=[Value(int64_val=-17850)])
    (name, view), *_ = views.items()
    values = {}
    for kind, sample in samples.items():
        value = Value()
        if kind.endswith("_list"):
            list_value = getattr(value, f"{kind}_val")
            list_value.SetInParent()
            list_value.val.extend(sample)
        else:
            setattr(value, f"{kind}_val", sample)
        values[kind] = value.SerializeToString().hex()
    fields = {feature: _mmh3(f"{name}:{feature}").hex() for feature in view["features"]}
    return {"key": _redis_key(project, key).hex(), "fields": fields, "values": values}


def main() -> None:
    address, project, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    request = json.loads((folder / "asked.json").read_text())
    store = open_store(address, project, folder)
    define(store, request["views"], folder)
    answer: dict = {"read": {}}
    for name, view in request["views"].items():
        answer["read"][name] = read(store, name, view, request["ids"][name])
        write(store, name, view, request["to_write"][name])
    answer["vectors"] = make_vectors(project, request["views"], request["samples"])
    (folder / "answered.json").write_text(json.dumps(answer))


if __name__ == "__main__":
    main()
