"""A gateway whose fake server holds two generations."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from gateway import schema
from live.exposures import read_exposures
from repository.experiments import find_experiment_folder, start_experiment
from serving.live.experiment import Experiment
from tests.unit.gateway.conftest import Gateway

CHAMPIONS, CHALLENGERS = [1, 2, 3], [4, 5, 2]
USERS = [str(user) for user in range(1, 13)]


class Tried:
    """A gateway whose fake server holds generation 2 beside 1. answers: JSON by user, of one run of the gateway."""

    def __init__(self, repo: Path, challenger=lambda query: CHALLENGERS, **settings) -> None:
        self.repo, self._challenger, self._settings, self._runs = repo, challenger, settings, 0
        self.open()

    def open(self) -> None:
        self.door = Gateway(self.repo, lambda query: CHAMPIONS, **self._settings)
        self.door.shop.server.challengers[2] = self._challenger

    def start(self, **settings) -> Experiment:
        usual: dict[str, Any] = {"name": "spring", "champion": 1, "challenger": 2}
        return start_experiment(self.repo, Experiment(**usual | settings))

    def ask(self, users=USERS, **params) -> dict[str, dict]:
        async def ask_all() -> dict[str, dict]:
            async with self.door.app.router.lifespan_context(self.door.app):
                answers = {}
                for user in users:
                    response = await self.door.ask_async("GET", "/v1/recommendations", params={"user": user} | params)
                    assert response.status_code == 200, response.text
                    answers[user] = response.json()
                    schema.Recommendations.model_validate(answers[user])
                await asyncio.sleep(0.01)  # for shadows
                return answers

        if self._runs:  # the last run closed its client
            self.open()
        self._runs += 1
        return asyncio.run(ask_all())

    @property
    def log(self) -> list[dict]:
        return read_exposures(find_experiment_folder(self.repo)).to_pylist()
