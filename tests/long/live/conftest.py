from tests.unit.live.conftest import reader, repository, upsert

__all__ = ["reader", "repository", "upsert"]
