from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.certificates import make_certificate
from tests.unit.clients.grpc_double import GrpcDouble
from tests.unit.clients.http_double import HttpDouble
from triton_recommender import AsyncRecommender, Recommendations, Recommender
from triton_recommender.tensors import Degraded

ANSWER = Recommendations((30, 10, 20, 40), (4.0, 3.0, 3.5, 1.0), Degraded.RANK | Degraded.RERANK, generation=2)

both = pytest.mark.parametrize("kind", ["blocking", "asyncio"])


def use(kind: str, urls: str | list[str], ask: Callable[[Any], list[Callable[[], Any]]], **settings: Any) -> list[Any]:
    """Return the results of `ask(client)`, a list of calls, by either client over fresh connections."""
    if kind == "blocking":
        with Recommender(urls, **settings) as shop:
            return [step() for step in ask(shop)]

    async def run() -> list[Any]:
        async with AsyncRecommender(urls, **settings) as shop:
            return [await step() for step in ask(shop)]

    return asyncio.run(run())


def recommend(shop: Any) -> list[Callable[[], Any]]:
    return [lambda: shop.recommend(1)]


def write_store(folder: Path, user_ids: list[int], events: list[int]) -> None:
    """Write the users of a stage, and how many events each has."""
    (folder / "store").mkdir(parents=True)
    np.save(folder / "store" / "user_ids.npy", np.array(user_ids, np.int64))
    np.save(folder / "store" / "event_count.npy", np.array([*events, 0], np.int64))  # the last row is the unknown user's


@pytest.fixture
def server():
    """Answers ANSWER to everybody."""
    double = GrpcDouble(lambda query: ANSWER)
    yield double
    double.stop()


@pytest.fixture
def http():
    """Answers as `server`, over HTTP."""
    double = HttpDouble(lambda query: ANSWER)
    yield double
    double.stop()


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    """Publishes generations 2 and 10 for people; 10 is a shop whose ids are text, and answers."""
    ids = np.array([10, 20, 30, 40], np.int64)
    for generation, prefix in (("2", ""), ("10", "new ")):
        folder = tmp_path / "repo" / "recommend" / generation
        folder.mkdir(parents=True)
        np.save(folder / "item_ids.npy", ids)
        (folder / "item_titles.json").write_text(json.dumps([f"{prefix}item {i} [red] café" for i in ids.tolist()]))
    (folder.parent / "config.pbtxt").write_text("version_policy { specific { versions: 10 } }")
    (folder / "item_names.json").write_text(json.dumps({"ten": 10, "twenty": 20}))
    (folder / "user_names.json").write_text(json.dumps({"ann": 7}))
    return tmp_path / "repo"


@pytest.fixture(scope="session")
def certificates(tmp_path_factory):
    """key and certificate of localhost, signed by itself; the client uses the same pair."""
    folder = tmp_path_factory.mktemp("tls")
    make_certificate(folder, "own")
    return folder / "own.key", folder / "own.pem"
