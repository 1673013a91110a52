from tests.unit.live.conftest import clock, folder, observe, pipeline, reader, redis, repository, state, upsert, writer

__all__ = ["clock", "folder", "observe", "pipeline", "reader", "redis", "repository", "state", "upsert", "writer"]
