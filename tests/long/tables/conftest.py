from tests.unit.tables.conftest import config, instances, open_tiers, over_rocksdb, source, start_applier

__all__ = ["config", "instances", "open_tiers", "over_rocksdb", "source", "start_applier"]
