"""A gateway over a small repository, whose server is a fake: no network, no tritonserver."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import ClassVar

import httpx
import numpy as np
import pytest

from gateway.app import create_app
from gateway.settings import GatewaySettings
from serving.contract.tensors import UPSERT
from serving.stages.live.models import Upsert
from tests.repositories import copy_lean_repository
from triton_recommender import Health, Unavailable
from triton_recommender.testing import AsyncFakeRecommender, Query

ITEMS = [3, 1, 2]
GONE = Unavailable("gone")


def failing(error: Exception = GONE) -> Callable[[Query], list[int]]:
    """Return a handler of a server that answers every question with an error."""

    def fail(_query: Query) -> list[int]:
        raise error

    return fail


class FakeShop(AsyncFakeRecommender):
    """is_asked_for_health: False to let a gateway start and stop though the test's server fails, hangs or is closed"""

    is_asked_for_health = True

    async def health(self) -> list[Health]:
        return await super().health() if self.is_asked_for_health else []


class Gateway:
    """A gateway that a test asks. shop: the fake server behind it; opened: all that were made and not closed"""

    opened: ClassVar[list[Gateway]] = []

    def __init__(self, repo: Path, handler=lambda query: ITEMS, tokens: dict[str, str] | None = None, **settings) -> None:
        patient = {"deadline_ms": 5_000.0}  # a busy machine keeps it
        self.repo = repo
        self.shop = FakeShop(handler, context={"device": "BYTES", "temperature": "FP32"})
        self.app = create_app(repo, self.shop, GatewaySettings(**patient | settings), tokens or {})
        self.opened.append(self)

    def ask(self, method: str, path: str, **options) -> httpx.Response:
        return asyncio.run(self.ask_async(method, path, **options))

    async def ask_async(self, method: str, path: str, **options) -> httpx.Response:
        transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.request(method, path, **options)

    def recommend(self, **params) -> dict:
        response = self.ask("GET", "/v1/recommendations", params=params)
        assert response.status_code == 200, response.text
        return response.json()

    def read_error(self, method: str, path: str, status: int = 400, **options) -> dict[str, str]:
        """Ask, and expect a status. Return the error of the answer."""
        response = self.ask(method, path, **options)
        assert response.status_code == status, response.text
        return response.json()["error"]

    def read_metric(self, name: str) -> dict[str, float]:
        """Return the values of a metric by their labels, as the page writes them."""
        lines = (line for line in self.ask("GET", "/metrics").text.splitlines() if line.startswith((f"{name}{{", f"{name} ")))
        return {line[len(name) : line.rindex(" ")]: float(line.rpartition(" ")[2]) for line in lines}

    def recommend_and_stop(self, **params) -> dict:
        """Ask for recommendations, and stop the gateway, which writes what it has logged."""

        async def ask_and_stop() -> dict:
            async with self.app.router.lifespan_context(self.app):
                return (await self.ask_async("GET", "/v1/recommendations", params=params)).json()

        return asyncio.run(ask_and_stop())

    def close(self) -> None:
        """Close what the app opened. FastAPI remembers the functions of its routes, so nothing else ever would."""
        self.shop.is_asked_for_health = False

        async def start_and_stop() -> None:
            async with self.app.router.lifespan_context(self.app):
                pass

        asyncio.run(start_and_stop())


@pytest.fixture(scope="module", autouse=True)
def closed() -> Iterator[None]:
    """Close the gateways of a file's tests: each holds up to 64 files and two threads."""
    yield
    while Gateway.opened:
        Gateway.opened.pop().close()


@pytest.fixture(scope="session")
def repo(tmp_path_factory) -> Path:
    """Return a copy, beside which some tests make a live store."""
    return copy_lean_repository(tmp_path_factory.mktemp("shop") / "repository")


@pytest.fixture
def own_repo(tmp_path) -> Path:
    """Return a copy of the test's own, which it may change."""
    return copy_lean_repository(tmp_path / "repository")


@pytest.fixture
def door(own_repo) -> Gateway:
    """Return a gateway of a repository of its own, whose server is gone: it knows its own files and the live store."""
    return Gateway(own_repo, failing())


@pytest.fixture
def change(door) -> Iterator[Callable[..., None]]:
    """change(item, **columns): as the model `upsert` does."""
    stage = Upsert.load(door.repo / UPSERT / "1")

    def upsert(item: int, **columns) -> None:
        kind, changed = (np.array([[text]], object) for text in (b"item", json.dumps(columns).encode()))
        stage({"kind": kind, "id": np.array([[item]]), "columns": changed})

    yield upsert
    stage.close()


@pytest.fixture
def gateway(repo) -> Callable[..., Gateway]:
    """gateway(handler, tokens=…, **settings) -> a Gateway."""

    return partial(Gateway, repo)
