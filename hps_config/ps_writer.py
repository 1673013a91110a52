"""Write a plan as a ps.json that is complete for both of NVIDIA's parsers and for our own levels."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hps_config.description import HpsDescription
from hps_config.memory import compute_eviction_rows, compute_page_bytes, count_hps_sets, fit_refresh_share
from hps_config.planning import Plan
from hps_config.reader import check_document
from serving.contract.errors import ConfigError


def name_sparse_folder(table: str) -> str:
    """Return the name of a table's folder below `sparse_root`."""
    return f"{table}.model"


def build_ps_document(description: HpsDescription, plan: Plan) -> dict[str, Any]:
    """Return the ps.json of a description and its plan, as a dict. Raises ConfigError when NVIDIA's parsers refuse it."""
    document: dict[str, Any] = {"supportlonglong": True, "volatile_db": _build_volatile_db(description, plan)}
    if description.budget.l3:
        document["persistent_db"] = {
            "type": "rocks_db",
            "path": description.persistent.path,
            "update_filters": [description.model],
        }
    if description.updates.brokers:
        document["update_source"] = {"type": "kafka_message_queue", "brokers": description.updates.brokers}
    document["models"] = [_build_model(description, plan)]
    _, findings = check_document(document)
    errors = [str(finding) for finding in findings if finding.level == "error"]
    if errors:
        raise ConfigError("the planned ps.json would not be served. Correct the description:\n  " + "\n  ".join(errors))
    return document


def write_ps_json(path: Path, description: HpsDescription, plan: Plan) -> None:
    """Write the ps.json of a plan. Raises ConfigError as `build_ps_document` does."""
    path.write_text(json.dumps(build_ps_document(description, plan), indent=1) + "\n")


def _build_volatile_db(description: HpsDescription, plan: Plan) -> dict[str, Any]:
    if not description.budget.l2:
        return {"type": "disabled"}
    volatile: dict[str, Any] = {
        "type": description.volatile.type,
        "num_partitions": description.volatile.num_partitions,
        # Matched against the model in a topic. HPS stores all that it receives, so it must not follow other models' tables.
        "update_filters": [description.model],
    }
    if description.volatile.type.startswith("redis"):
        volatile["address"] = description.volatile.address
        volatile["num_node_connections"] = min(5, description.volatile.num_partitions)
    else:
        l2_rows = [(planned.table, planned.l2_rows) for planned in plan.tables]
        volatile["allocation_rate"] = compute_page_bytes(l2_rows, description.volatile.num_partitions)
    if not plan.l2_complete:
        # evict_oldest is LRU, by the time of the last use, for which the hit rates are predicted
        volatile |= {
            "overflow_margin": plan.overflow_margin,
            "max_batch_size": compute_eviction_rows(plan.overflow_margin),
            "overflow_policy": "evict_oldest",
            "cache_missed_embeddings": True,
        }
    return volatile


def _build_model(description: HpsDescription, plan: Plan) -> dict[str, Any]:
    tables = [planned.table for planned in plan.tables]
    serving = description.serving
    most_sets = max(count_hps_sets(table.rows, plan.gpucacheper) for table in tables)  # HPS sizes its buffers for this table
    return {
        "model": description.model,
        "sparse_files": [f"{description.sparse_root}/{name_sparse_folder(table.name)}" for table in tables],
        "embedding_table_names": [table.name for table in tables],
        "embedding_vecsize_per_table": [table.width for table in tables],
        "maxnum_catfeature_query_per_table_per_sample": [table.keys_per_sample for table in tables],
        "default_value_for_each_table": [table.default_value for table in tables],
        "max_batch_size": serving.max_batch_size,
        "deployed_device_list": serving.devices,
        "num_of_worker_buffer_in_pool": max(2, serving.instances),
        "num_of_refresher_buffer_in_pool": 1,
        "cache_refresh_percentage_per_iteration": fit_refresh_share(most_sets, serving.refresh_share),
        "gpucache": True,
        "gpucacheper": plan.gpucacheper,
        "hit_rate_threshold": serving.hit_rate_threshold,
        "embedding_cache_type": "dynamic",
        "row_format_per_table": [table.row_format for table in tables],
    }
