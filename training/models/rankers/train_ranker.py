"""Train the DLRM listwise on requests as served: taken candidates must rank first."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from serving.stages.features.ranking import N_FEATURES, SCORE
from training.models.rankers.dlrm import DLRM, RankingModel, Shape
from training.models.rankers.ranking_data import ItemSlots, Requests
from training.models.schedule import rise_and_fall
from training.time_left import TimeLeft

LEAST_DEVIATION = 0.3  # all numbers are scaled to about 1 (serving/stages/features/ranking.py, NVTabular's Normalize)

Report = Callable[[str], None]
Start = Callable[[DLRM], bool]
"""Sets a new model to the weights of an earlier one. Returns False, and leaves it as it is, where these do not fit."""

Measure = Callable[[np.ndarray, np.ndarray], dict[str, float]]  # float32 [N, C] logits, [N, C] taken -> larger is better


@dataclass(frozen=True)
class RankerSettings:
    """Settings; the defaults work on shop, film and grocery logs."""

    width: int = 16  # D
    bottom: tuple[int, ...] = (64,)
    top: tuple[int, ...] = (128, 64)
    epochs: int = 10  # the one with the highest likelihood of taken validation items is kept
    warm_epochs: int = 5  # where training starts from the weights of an earlier model
    requests_per_batch: int = 32
    candidates_per_request: int = 128  # all taken ones, the rest sampled
    learning_rate: float = 2e-3
    network_decay: float = 1e-4
    table_decay: float = 5.0
    min_examples_per_row: int = 50  # a row with fewer requests (users) or taken candidates (items) shares OOV's vector
    validation_share: float = 0.15
    blends: tuple[float, ...] = (0.0, 0.25, 0.5, 1.0, 2.0, 4.0, 16.0)


@dataclass(frozen=True)
class Ranker:
    """A trained DLRM. Its rank score is logit + blend * standardised retrieval score.

    compression: of its network; started: whether its training started from the weights of an earlier generation
    teacher: the DLRM that its network imitates, None where it imitates none
    no_teachers: why no other network was tried as a teacher; "" where one was, or where the network imitates none
    """

    model: DLRM
    blend: float
    quality: dict[str, float]
    compression: str = "none"
    started: bool = False
    teacher: DLRM | None = None
    no_teachers: str = ""

    @property
    def learned(self) -> bool:
        """Whether there was anything to learn from, and to judge it by."""
        return "ndcg_at_10" in self.quality

    @property
    def validated(self) -> float:
        """NDCG@10 + Recall@20 on validation requests."""
        return self.quality["ndcg_at_10"] + self.quality["recall_at_20"]


def train_ranker(
    teaching: Sequence[Requests],
    validation: Requests,
    tables: tuple[dict[str, int], dict[str, int]],
    settings: RankerSettings,
    seed: int = 0,
    report: Report = print,
    start: Start | None = None,
    without_events: Sequence[Requests] = (),
) -> Ranker:
    """Train a ranker that puts taken candidates first.

    teaching: requests of one or several moments; tables: of users and of items, name -> rows, in slot order
    start: sets the weights that training starts from; None: it starts from scratch
    without_events: some of the same requests without events, which teach too, but are not counted again
    """
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    n_pair_numbers = validation.items.numbers.shape[1] + validation.cross.shape[2]
    n_user_numbers = validation.users.user_continuous.shape[1]
    shape = Shape(*tables, n_user_numbers, n_pair_numbers, settings.width, settings.bottom, settings.top)
    model = DLRM(shape)
    counted, uncounted = ([p.take(np.flatnonzero(p.taken.any(axis=1))) for p in parts] for parts in (teaching, without_events))
    teaching = [*counted, *uncounted]
    if not any(len(part) for part in teaching) or not validation.taken.any():
        report("ranker: no training request or no validation request retrieved an item that its user took: nothing is learned")
        return Ranker(_zero_logits(model), 1.0, {"requests": 0})
    _standardize(model, teaching)
    _share_rare_rows(model, counted, settings.min_examples_per_row)
    started = start is not None and start(model)
    epochs = settings.warm_epochs if started else settings.epochs
    fit(model, teaching, validation, replace(settings, epochs=epochs), rng, report)
    blend, quality = find_best_blend(model, validation, settings.blends)
    report(f"ranker: {len(validation):,} validation requests, {describe_quality(quality)}, blend {blend}")
    quality |= {"requests": sum(map(len, counted)), "validation_requests": len(validation)}
    return Ranker(model, blend, quality, started=started)


@torch.no_grad()
def _zero_logits(model: DLRM) -> DLRM:
    """Set the last layer to zero, so that every logit is 0."""
    model.network.top[-1].weight.zero_()
    model.network.top[-1].bias.zero_()
    return model


def fit(
    model: RankingModel,
    teaching: Sequence[Requests],
    validation: Requests,
    settings: RankerSettings,
    rng: np.random.Generator,
    report: Report,
    measure: Measure | None = None,
) -> None:
    """Train `model` in place, and keep the weights of the epoch with the largest sum of `measure` on validation requests.

    measure: a function of logits and labels; `measure_likelihood` when None
    """
    measure = measure or measure_likelihood
    groups = [
        {"params": list(model.network.parameters()), "weight_decay": settings.network_decay},
        {"params": list(model.list_table_rows()), "weight_decay": settings.table_decay},
    ]
    optimizer = torch.optim.AdamW(groups, lr=settings.learning_rate)
    n_steps = sum(-(-len(part) // settings.requests_per_batch) for part in teaching) * settings.epochs
    schedule = rise_and_fall(optimizer, settings.learning_rate, n_steps + 1)
    best_quality, best_weights, left = float("-inf"), None, TimeLeft(settings.epochs)
    for epoch in range(1, settings.epochs + 1):
        model.train()
        losses = []
        for batch in draw_batches(teaching, settings, rng):
            loss = compute_loss(model, batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
        quality = measure(predict(model, validation), validation.taken)
        progress = f"epoch {epoch} of {settings.epochs}, {left.describe(epoch)}"
        report(f"ranker: {progress}, loss {np.mean(losses):.3f}, validation {describe_quality(quality)}")
        if best_weights is None or sum(quality.values()) > best_quality:
            best_quality = sum(quality.values())
            best_weights = {name: value.clone() for name, value in model.state_dict().items()}
    assert best_weights is not None  # there is at least one epoch
    model.load_state_dict(best_weights)
    model.eval()


def measure_likelihood(logits: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """Return the mean log-likelihood of the taken candidates, as `compute_listwise_loss` weighs it; 0 without any.

    It depends on all candidates. NDCG@10 depends on few, and its noise would choose epochs that rank other requests worse.
    logits: float32 [N, C], -inf at padding; labels: bool [N, C]
    """
    is_taught = labels.any(axis=1)
    if not is_taught.any():
        return {"log_likelihood": 0.0}
    scores = torch.from_numpy(logits[is_taught])
    return {"log_likelihood": -compute_listwise_loss(scores, torch.from_numpy(labels[is_taught]), ~scores.isneginf()).item()}


def find_best_blend(model: RankingModel, validation: Requests, blends: tuple[float, ...]) -> tuple[float, dict[str, float]]:
    """Return the blend weight of the retrieval score, and the validation quality with it and of retrieval alone.

    A large weight lets retrieval outvote a weak ranker.
    """
    logits, retrieval = predict(model, validation), take_retrieval_z(validation)
    qualities = {blend: measure_ranking_quality(logits + blend * retrieval, validation.taken) for blend in blends}
    best = max(blends, key=lambda blend: (sum(qualities[blend].values()), -blend))
    retrieval_quality = measure_ranking_quality(np.where(np.isfinite(logits), retrieval, -np.inf), validation.taken)
    return best, {**qualities[best], **{f"retrieval_{name}": value for name, value in retrieval_quality.items()}}


def describe_quality(quality: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.4f}" for name, value in quality.items())


def take_retrieval_z(requests: Requests) -> np.ndarray:
    """Return the standardised retrieval score, float32 [N, C], which is blended in."""
    return requests.cross[..., SCORE - N_FEATURES]


def draw_batches(teaching: Sequence[Requests], settings: RankerSettings, rng: np.random.Generator) -> Iterator[Requests]:
    """Yield batches in random order, each request with its taken candidates and a sample of others; one moment per batch."""
    size = settings.requests_per_batch
    chunks = [(part, rows) for part in teaching for rows in _split(rng.permutation(len(part)), size)]
    for number in rng.permutation(len(chunks)):
        part, rows = chunks[number]
        yield _sample_candidates(part.take(rows), settings.candidates_per_request, rng)


def _split(rows: np.ndarray, size: int) -> list[np.ndarray]:
    return [rows[start : start + size] for start in range(0, len(rows), size)]


def _sample_candidates(batch: Requests, width: int, rng: np.random.Generator) -> Requests:
    """Return `width` candidates per request, drawn at random: all taken ones if they fit, or those with large shares rather."""
    width = min(width, batch.candidates.shape[1])
    key = rng.random(batch.taken.shape) - batch.taken
    chosen = np.argpartition(key, width - 1, axis=1)[:, :width]
    take = np.arange(len(batch))[:, None]
    columns = (batch.candidates, batch.retrieval_scores, batch.cross, batch.taken)
    candidates, scores, cross, labels = (values[take, chosen] for values in columns)
    return Requests(batch.users, candidates, scores, cross, labels, batch.items, batch.user_ids)


def compute_loss(model: RankingModel, batch: Requests) -> torch.Tensor:
    """Return the loss of a batch that `draw_batches` yields."""
    return compute_listwise_loss(compute_logits(model, batch), torch.from_numpy(batch.taken), torch.from_numpy(batch.valid))


def compute_listwise_loss(scores: torch.Tensor, labels: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """Return the cross-entropy of a softmax over valid candidates, weighted by the root of the number of taken ones."""
    log_share = torch.log_softmax(scores.masked_fill(~valid, -1e9), dim=1)
    count = labels.sum(dim=1).clamp(min=1)
    return (-(log_share * labels).sum(dim=1) / count.sqrt()).mean()


def compute_logits(model: RankingModel, requests: Requests) -> torch.Tensor:
    """Return logits, float32 [N, C]."""
    items, candidates = requests.items, requests.candidates
    user_rows = model.look_up_users(torch.from_numpy(requests.users.user_categorical))
    item_rows = look_up_items(model, items, candidates)
    numbers = np.concatenate([items.numbers[candidates], requests.cross], axis=2)
    inputs = [torch.from_numpy(requests.users.user_continuous), user_rows, torch.from_numpy(numbers), item_rows]
    if model.reads_history:
        history, age_days = requests.users.history_positions, torch.from_numpy(requests.users.history_age_days)
        inputs += [look_up_items(model, items, history), torch.from_numpy(history < items.n_items), age_days]
    return model.network(*inputs)


def look_up_items(model: RankingModel, items: ItemSlots, positions: np.ndarray) -> torch.Tensor:
    """Return the item rows of positions, int [N, C], float32 [N, C, Si, D]. Each item's lists are averaged once."""
    if all(rows.shape[1] == 1 for rows in items.rows):
        return model.look_up_items([torch.from_numpy(rows[positions]) for rows in items.rows])
    distinct, places = np.unique(positions, return_inverse=True)
    vectors = model.look_up_items([torch.from_numpy(rows[distinct]) for rows in items.rows])
    return vectors[torch.from_numpy(places.reshape(positions.shape))]


def compute_rank_scores(ranker: Ranker, requests: Requests) -> np.ndarray:
    """Return rank scores as the rank stage serves them, float32 [N, C], -inf at padding."""
    return compute_blended_scores(ranker.model, ranker.blend, requests)


def compute_blended_scores(model: RankingModel, blend: float, requests: Requests) -> np.ndarray:
    """Return the logits with the retrieval score blended in, float32 [N, C], -inf at padding."""
    return predict(model, requests) + np.float32(blend) * take_retrieval_z(requests)


def compute_shares(scores: np.ndarray) -> np.ndarray:
    """Return the softmax over each list, float32 [N, C], 0 at padding. scores: float32 [N, C], -inf at padding."""
    weight = np.exp(scores - np.maximum(scores.max(axis=1, keepdims=True), np.finfo(np.float32).min))
    return (weight / np.maximum(weight.sum(axis=1, keepdims=True), 1e-9)).astype(np.float32)


@torch.no_grad()
def predict(model: RankingModel, requests: Requests) -> np.ndarray:
    """Return logits, float32 [N, C], -inf at padding."""
    model.eval()
    blocks = _split(np.arange(len(requests)), 128) or [np.arange(0)]
    logits = np.concatenate([compute_logits(model, requests.take(rows)).numpy() for rows in blocks])
    return np.where(requests.valid, logits, -np.inf)


def measure_ranking_quality(scores: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """Return the means of `measure_gains` over requests with a taken item; 0 without any."""
    return {name: float(values.mean()) if len(values) else 0.0 for name, values in measure_gains(scores, labels).items()}


def measure_gains(scores: np.ndarray, labels: np.ndarray) -> dict[str, np.ndarray]:
    """Return NDCG@10 and Recall@20 of each request with a taken item; items that retrieval missed do not count.

    scores: float [N, C]; labels: bool [N, C]
    """
    scores, labels = scores[is_taught := labels.any(axis=1)], labels[is_taught]
    order = np.argsort(-scores, axis=1, kind="stable")[:, :20]
    hits = np.take_along_axis(labels, order, axis=1)
    count = labels.sum(axis=1)
    discount = 1 / np.log2(np.arange(min(10, hits.shape[1])) + 2)
    ideal = np.append(0.0, np.cumsum(discount))[np.minimum(count, len(discount))]
    return {"ndcg_at_10": hits[:, : len(discount)] @ discount / ideal, "recall_at_20": hits.sum(axis=1) / count}


def _share_rare_rows(model: DLRM, teaching: Sequence[Requests], at_least: int) -> None:
    """Count the requests per user row and the taken candidates per item row, and let rare rows share OOV's vector."""
    for slot, table in enumerate(model.user_tables):
        rows = np.concatenate([part.users.user_categorical[:, slot] for part in teaching])
        table.share_rare(np.bincount(rows, minlength=len(table.shared)), at_least)
    for slot, table in enumerate(model.item_tables):
        rows = np.concatenate([part.items.rows[slot][part.candidates[part.taken]].ravel() for part in teaching])
        table.share_rare(np.bincount(rows, minlength=len(table.shared)), at_least)


def _standardize(model: DLRM, teaching: Sequence[Requests]) -> None:
    """Standardise the network's numbers over the valid candidates (mean 0, standard deviation 1).

    A column that hardly varied in training may vary in serving (sales of the last week, at the end of the log), so its
    deviation has a lower bound.
    """
    pair = np.concatenate(
        [np.concatenate([p.items.numbers[p.candidates[p.valid]], p.cross[p.valid]], axis=1) for p in teaching]
    )
    user = np.concatenate([part.users.user_continuous for part in teaching])
    mean, deviation = np.hstack([compute_moments(numbers) for numbers in (user, pair)])
    model.network.mean.copy_(torch.from_numpy(mean))
    model.network.scale.copy_(torch.from_numpy(1 / np.maximum(deviation, LEAST_DEVIATION)))


def compute_moments(numbers: np.ndarray) -> np.ndarray:
    """Return mean and standard deviation of each column, float64 [2, F]. numbers: float32 [N, F]

    NumPy adds the rows of a matrix one by one: in float32, the mean of millions of rows is off by several per cent. A column at
    a time, because float64 takes twice the memory.
    """
    columns = [(column.mean(dtype=np.float64), column.std(dtype=np.float64)) for column in numbers.T]
    return np.array(columns, np.float64).reshape(-1, 2).T
