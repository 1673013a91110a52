"""A gateway over a small repository, whose server is a fake: no network, no tritonserver."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from pathlib import Path

import httpx
import pytest

from gateway.app import create_app
from gateway.settings import GatewaySettings
from tests.repositories import copy_lean_repository
from triton_recommender.testing import AsyncFakeRecommender

ITEMS = [3, 1, 2]


class Gateway:
    """A gateway that a test asks. shop: the fake server behind it."""

    def __init__(self, repo: Path, handler=lambda query: ITEMS, tokens: dict[str, str] | None = None, **settings) -> None:
        patient = {"deadline_ms": 5_000.0}  # a busy machine keeps it
        self.repo = repo
        self.shop = AsyncFakeRecommender(handler, context={"device": "BYTES", "temperature": "FP32"})
        self.app = create_app(repo, self.shop, GatewaySettings(**patient | settings), tokens or {})

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


@pytest.fixture(scope="session")
def repo(tmp_path_factory) -> Path:
    """A copy: a live store, which some tests make, lies beside it."""
    return copy_lean_repository(tmp_path_factory.mktemp("shop") / "repository")


@pytest.fixture
def gateway(repo) -> Callable[..., Gateway]:
    """gateway(handler, tokens=…, **settings) -> a Gateway."""

    return partial(Gateway, repo)
