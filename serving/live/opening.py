"""Open the live state that a published generation reads."""

from __future__ import annotations

from pathlib import Path

from serving.contract.artifacts import StageInfo
from serving.live.reader import Reader
from serving.live.store import find_live_folder


def open_reader(repository: Path, info: StageInfo) -> Reader:
    """Return a reader of this machine's store and, where machines share their users, of Redis. The caller closes it."""
    folder = find_live_folder(repository, info.live_folder)
    if not info.live_redis:
        return Reader(folder, info.shop)
    from serving.live.shared.redis_reader import RedisReader  # its libraries take memory
    from serving.live.shared.redis_state import RedisState

    return RedisReader(folder, info.shop, RedisState(info.live_redis, info.live_project))
