"""The gateway knows users whose events another machine took, where machines share users by Redis."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing
from pathlib import Path

import pytest

from live.sharing import Sharer
from serving.contract.artifacts import read_stage
from serving.live.layout import Layout
from serving.live.shared.redis_state import PATIENT_S, RedisState
from serving.live.store import find_live_folder
from serving.live.writer import Writer
from tests.unit.gateway.conftest import Gateway
from tests.unit.live.batches import KINDS, purchase
from tests.unit.tables.redis_server import RedisServer
from triton_recommender.ids import session_id

ELSEWHERE, NOBODY = 999_001, 999_002


@pytest.fixture
def redis(tmp_path) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path / "redis")
    yield server
    server.stop()


@pytest.fixture
def repo(own_repo, redis) -> Path:
    """Return a repository whose users are shared by Redis."""
    stage = own_repo / "preprocess" / "1" / "stage.json"
    stage.write_text(json.dumps(json.loads(stage.read_text()) | {"live_redis": redis.address, "live_project": "shop"}))
    return own_repo


def write_store(folder: Path, repo: Path) -> AbstractContextManager[Writer]:
    """Return a live store of the repository's shop."""
    return closing(Writer(folder, Layout(), KINDS.names, shop=read_stage(repo / "preprocess" / "1").shop))


def test_a_redis_that_hangs_holds_up_no_other_request(repo, redis):
    answered: list[str] = []

    async def ask_both() -> None:
        async def ask(user: str) -> None:
            assert (await door.ask_async("GET", "/v1/recommendations", params={"user": user})).status_code == 200
            answered.append(user)

        await asyncio.gather(ask(str(NOBODY)), ask("1"))

    with write_store(find_live_folder(repo), repo):
        door = Gateway(repo)
        assert door.recommend(user=str(NOBODY), session="a3f")["known"] is False  # connects to Redis
        redis.freeze()
        try:
            asyncio.run(ask_both())
        finally:
            redis.thaw()
    assert answered == ["1", str(NOBODY)]


def test_users_and_visitors_of_another_machine_are_known(repo, tmp_path, redis):
    with (
        write_store(find_live_folder(repo), repo),
        write_store(tmp_path / "other.live", repo) as other,
        closing(RedisState(redis.address, "shop", PATIENT_S)) as state,
    ):
        for user in (ELSEWHERE, session_id("a3f")):
            other.append(purchase(user, 1))
        sharer = Sharer(other, state, idle_days=1.0, session_hours=1.0)
        sharer.share(sharer.begin())
        door = Gateway(repo)
        assert door.recommend(user=str(ELSEWHERE))["known"] is True
        assert door.recommend(session="a3f")["known"] is True
        assert door.recommend(user=str(NOBODY))["known"] is False
        for user in (ELSEWHERE, NOBODY):  # of user and session, the session counts where the user is unknown
            door.recommend(user=str(user), session="a3f")
        assert [query.user_id for query in door.shop.queries[-2:]] == [ELSEWHERE, session_id("a3f")]
        redis.freeze()
        answer = door.recommend(user=str(ELSEWHERE))
        assert (answer["known"], len(answer["items"])) == (False, 3)
