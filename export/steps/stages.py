"""Write the stages' artifacts into the staged folders of a generation."""

from __future__ import annotations

import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from export.settings import PipelineSettings, Settings
from export.steps.live import make_event_kinds, write_live_models
from export.steps.reserve import make_content, reserve_rows
from repository.applied_rules import PRICES_FILE
from repository.publish import Staging
from repository.rules import compile_rules
from serving.contract.artifacts import StageInfo
from serving.contract.tensors import STAGES, Axes
from serving.stages.features.item_statistics import ItemStatistics
from serving.stages.features.ranking import SCALE
from serving.stages.live.catalogue.candidates import RECENT
from serving.stages.live.catalogue.item_features import FOLDER as PLAN_FOLDER
from serving.stages.live.content import Content
from serving.stages.live.counts.sales import LEARNED_SALES
from serving.stages.retrieve import HISTORY_TABLE, POPULARITY, TABLES_FOLDER
from serving.stages.rules.config import CONFIG_FILE, RulesConfig
from training.dataset import Dataset
from training.features.build import Features
from training.features.trends import write_trends
from training.models.candidates.retriever import Retriever
from training.models.rankers.train_ranker import Ranker
from training.models.ranking import Ranking, save_ranking
from training.retrieval.content_tower import fit_content_tower
from training.retrieval.save import save_retriever

SAMPLE_USERS = 512  # real users on whom parity and the index's recall are measured


def write_stages(
    staging: Staging,
    dataset: Dataset,
    features: Features,
    retriever: Retriever,
    ranking: Ranking,
    axes: Axes,
    export_settings: Settings,
) -> dict[str, Any]:
    """Write the artifacts of the four stages and of the live models. Return the reports for the manifest."""
    pipeline, compute = export_settings.pipeline, export_settings.compute
    rng = np.random.default_rng(pipeline.seed)
    user_ids = dataset.interactions["user_id"].unique()
    sample = features.encode_users(rng.choice(user_ids, min(SAMPLE_USERS, len(user_ids)), replace=False))
    features.save_preprocess(staging.folder("preprocess"))
    available = dataset.items["available"].to_numpy()
    retrieve, retrievers, choice = save_retriever(
        staging.folder("retrieve"),
        retriever,
        features,
        available,
        sample,
        axes.candidates,
        pipeline.filter_seen,
        compute.index_effort,
    )
    rank, rerank = save_ranking(staging.folder("rank"), staging.folder("rerank"), ranking, features)
    features.item_plan.save(staging.folder("rank") / PLAN_FOLDER)
    repeats = not pipeline.filter_seen
    ranks = rank.settings | {"threads": compute.rank_threads, "as_of_s": features.as_of_s, "repeats": repeats}
    retrieve |= {"as_of_s": features.as_of_s}
    np.save(staging.folder("retrieve") / f"{POPULARITY}.npy", compute_recent_counts(ranking.statistics))
    live = export_settings.live
    reranks = rerank.settings | {"newcomer_share": live.new_item_share, "newcomer_place": live.new_item_place}
    interests = list(make_event_kinds(dataset.description).interests)
    preprocess = {"interests": interests, "repeats": repeats}
    settings = {"preprocess": preprocess, "retrieve": retrieve, "rank": ranks, "rerank": reranks}
    if dataset.learned_sales is not None:
        for name in ("retrieve", "rank"):
            np.save(staging.folder(name) / f"{LEARNED_SALES}.npy", dataset.learned_sales)
    for name, stage_settings in settings.items():
        place = (live.folder, dataset.description.name, live.redis, live.feast_project)
        info = StageInfo(name, staging.generation, axes, features.context, stage_settings, *place)
        info.write(staging.folder(name))
    write_live_models(staging, info, dataset, live)
    folders = {name: staging.folder(name) for name in STAGES}
    content, ranker = make_content(dataset), ranking.ranker
    tower_report = write_content_tower(folders["retrieve"], content, pipeline.seed)
    reserve_rows(folders, live.new_items)
    write_trends(folders["rank"], dataset, features.log.aggregates, live.new_items)
    for folder in folders.values():
        content.save(folder)
    return {
        "preprocess_replay": features.parity,
        "onnx_parity": [asdict(parity) for parity in (*retrievers, rank.parity, rerank.parity)],
        "index": choice.report(),
        "content_tower": tower_report,
        "validation": {"ranker": report_ranker(ranker), "reranker": ranking.reranker.quality},
    }


def report_ranker(ranker: Ranker) -> dict[str, Any]:
    """Return a ranker's quality, the compression that serves, and why no other teachers were tried, for the manifest."""
    not_tried = {"teachers_not_tried": ranker.no_teachers} if ranker.no_teachers else {}
    return ranker.quality | {"compression": ranker.compression} | not_tried


def write_content_tower(folder: Path, content: Content, seed: int) -> dict[str, Any] | None:
    """Fit the content tower of new items; write it if it beats the vectors of similar items. Return the comparison."""
    arrays = [np.load(folder / f"{name}.npy") for name in ("item_vectors", f"{TABLES_FOLDER}/{HISTORY_TABLE}")]
    tower, judgement = fit_content_tower(content, np.concatenate([arrays[0], arrays[1][:-1]], axis=1), seed)
    if tower:
        tower.save(folder)
    return judgement._asdict() if judgement else None


def compute_recent_counts(statistics: ItemStatistics) -> np.ndarray:
    """Return how often each item was taken lately, decayed over the period RECENT, float32 [n_items + 1]."""
    return np.expm1(statistics.popularity[:, 1 + RECENT] / np.float32(SCALE))


def write_rules(staging: Staging, rules: RulesConfig, dataset: Dataset, features: Features, pipeline: PipelineSettings) -> None:
    """Compile the shop's rules against its catalogue into the folder of rerank; retrieve gets the pins. Raises ConfigError."""
    folder = staging.folder("rerank")
    items = dataset.items
    positives = dataset.interactions.loc[dataset.interactions["positive"].to_numpy(), "item_id"].to_numpy()
    names = None if dataset.item_names is None else dict(zip(dataset.item_names["name"], dataset.item_names["id"], strict=True))
    compile_rules(
        folder,
        rules,
        item_ids=features.items.ids,
        category=_list_texts(items["category"]),
        provider=_list_texts(items["provider"]),
        price=dataset.prices,
        popularity=np.bincount(features.items.find_positions(positives), minlength=len(items)),
        items_returned=pipeline.items_returned,
        item_names=names,
    )
    shutil.copyfile(folder / CONFIG_FILE, staging.folder("retrieve") / CONFIG_FILE)
    if dataset.prices is not None:
        np.save(folder / PRICES_FILE, np.asarray(dataset.prices))


def _list_texts(texts: pd.Series) -> list[str | None]:
    return [text if isinstance(text, str) else None for text in texts]
