"""`python -m experiments.plain_server REPO PORT`: the pipeline behind FastAPI, one request at a time, as many services do it.

Something to compare tritonserver with: the same stages, no batching, one process.
"""

from __future__ import annotations

import sys
from pathlib import Path

import uvicorn
from fastapi import FastAPI

from serving.pipeline import Pipeline


def create_app(repo: Path) -> FastAPI:
    pipeline, app = Pipeline.load(repo), FastAPI()

    @app.get("/v1/recommendations")
    async def recommend(user: int) -> dict:
        outputs = pipeline.recommend([user])
        pairs = zip(outputs["item_ids"][0].tolist(), outputs["scores"][0].tolist(), strict=True)
        return {"items": [{"id": item_id, "score": score} for item_id, score in pairs if item_id >= 0]}

    return app


if __name__ == "__main__":
    uvicorn.run(create_app(Path(sys.argv[1])), host="127.0.0.1", port=int(sys.argv[2]), log_level="warning", access_log=False)
