"""Judge a candidate generation against the serving one, by their answers to the same questions.

What is shown      NDCG@10 and coverage of the answers.
How it is scored   AUC and calibration of the rank stage's scores, over the candidates that both generations retrieved: the same
                   pairs for both, so that a generation cannot look better by finding only what is easy to rank.

Rank scores are not probabilities: they are trained by a softmax over the candidates of one request, and the retrieval score is
blended in, so only their differences within a request have a meaning. We judge the calibration of a mapping (Platt's) from the
log-odds of a candidate's softmax share to the probability that it is the right one: fitted on the earlier questions, judged on
the later ones.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import scipy.sparse as sp
from scipy.special import log_softmax
from sklearn.linear_model import LogisticRegression

from export.continuous.prequential import Answers, compute_gains, find_ranks
from serving.contract.tensors import PAD_ID, PAD_SCORE
from training.evaluation.metrics import auc

LEAST_QUESTIONS = 100
LEAST_RANKED = 100  # questions whose item both generations retrieved, to judge rankers by
LEAST_QUALITY = 0.98  # of the serving generation's NDCG@10
LEAST_COVERAGE = 0.5  # of the different items that the serving generation shows
LEAST_AUC = 0.98  # of the serving generation's
MOST_MISCALIBRATION = 0.25  # above the serving generation's calibration error
BINS = 5  # of calibration; each holds as many expected hits as the others
RESAMPLES = 1_000


@dataclass(frozen=True)
class Verdict:
    """Comparison of a candidate with the serving generation. fault: why it is not published, "" where it is.

    candidate, serving: mean NDCG@10; low, high: 95 % interval of their difference; coverage: different items that the candidate
    shows, over those that the serving generation does; all are NaN with fewer than LEAST_QUESTIONS
    ranked: questions whose item both generations retrieved; auc, calibration: of the rank scores, calibration as from
    `measure_calibration_error`; auc_low, auc_high: 95 % interval of the difference in AUC; these and the serving generation's
    are NaN with fewer than LEAST_RANKED

    The intervals are over users, because the questions of one user are alike. Rounds follow rounds, so a small loss that is
    beyond chance is refused too: many of them would add up.
    """

    questions: int
    fault: str
    candidate: float = np.nan
    serving: float = np.nan
    low: float = np.nan
    high: float = np.nan
    coverage: float = np.nan
    ranked: int = 0
    auc: float = np.nan
    serving_auc: float = np.nan
    auc_low: float = np.nan
    auc_high: float = np.nan
    calibration: float = np.nan
    serving_calibration: float = np.nan

    def __str__(self) -> str:
        if self.questions < LEAST_QUESTIONS:
            return self.fault
        figures = (
            f"NDCG@10 {self.candidate:.4f} against {self.serving:.4f} on {self.questions:,} questions, difference "
            f"{self.low:+.4f} to {self.high:+.4f} (95 %), {self.coverage:.2f} times as many items shown, "
        )
        if self.ranked < LEAST_RANKED:
            figures += f"rankers not judged (both retrieved the item of {self.ranked} questions, and {LEAST_RANKED} are needed)"
        else:
            figures += (
                f"AUC {self.auc:.4f} against {self.serving_auc:.4f}, difference {self.auc_low:+.4f} to {self.auc_high:+.4f} "
                f"(95 %), and calibration error {self.calibration:.2f} against {self.serving_calibration:.2f} on "
                f"{self.ranked:,} of them"
            )
        return f"{figures}: {self.fault or 'published'}"


def judge(candidate: Answers, serving: Answers, items: np.ndarray, user_ids: np.ndarray, rng: np.random.Generator) -> Verdict:
    """Compare the answers of two generations to the same questions, oldest first.

    items: int64 [Q], the right ones; user_ids: int64 [Q], who asks
    """
    count = len(items)
    if count < LEAST_QUESTIONS:
        fault = f"not published, because the newest events hold {count} questions, and {LEAST_QUESTIONS} are needed to judge"
        return Verdict(count, fault)
    gains, serving_gains = (compute_gains(find_ranks(answers.items, items)) for answers in (candidate, serving))
    quality, serving_quality = float(gains.mean()), float(serving_gains.mean())
    low, high = resample_mean(gains - serving_gains, user_ids, rng)
    n_shown, n_serving_shown = (len(np.setdiff1d(answers.items, [PAD_ID])) for answers in (candidate, serving))
    coverage = n_shown / max(n_serving_shown, 1)
    both = share_candidates(candidate, serving)
    hits = (candidate.candidates == items[:, None]) & np.isfinite(both[0])
    rankable = find_rankable(both[0], hits)
    ranked = int(rankable.sum())
    own_auc = serving_auc = auc_low = auc_high = own_error = serving_error = np.nan
    if ranked >= LEAST_RANKED:
        aucs, serving_aucs = (compute_ranking_aucs(scores, hits)[rankable] for scores in both)
        own_auc, serving_auc = float(aucs.mean()), float(serving_aucs.mean())
        auc_low, auc_high = resample_mean(aucs - serving_aucs, user_ids[rankable], rng)
        own_error, serving_error = (measure_calibration_error(scores, hits) for scores in both)
    fault = ""
    if quality < LEAST_QUALITY * serving_quality:
        fault = f"not published, because its NDCG@10 is less than {LEAST_QUALITY:.0%} of the serving generation's"
    elif high < 0:
        fault = "not published, because its NDCG@10 is significantly below the serving generation's"
    elif coverage < LEAST_COVERAGE:
        fault = f"not published, because it shows less than {LEAST_COVERAGE:.0%} as many items as the serving generation"
    elif own_auc < LEAST_AUC * serving_auc:
        fault = f"not published, because its AUC is less than {LEAST_AUC:.0%} of the serving generation's"
    elif own_error > serving_error + MOST_MISCALIBRATION:
        fault = f"not published, because its calibration error is over {MOST_MISCALIBRATION} above the serving generation's"
    figures = (quality, serving_quality, low, high, coverage, ranked)
    return Verdict(count, fault, *figures, own_auc, serving_auc, auc_low, auc_high, own_error, serving_error)


def resample_mean(values: np.ndarray, user_ids: np.ndarray, rng: np.random.Generator) -> tuple[float, float]:
    """Return the 95 % interval of the mean of values by the bootstrap over users (cluster bootstrap: Field and Welsh 2007).

    A resampled user brings all questions, so a basket of fifteen counts once. values: float64 [Q]; user_ids: int64 [Q]
    """
    users = np.unique(user_ids, return_inverse=True)[1]
    sums, counts = np.bincount(users, values), np.bincount(users)
    questions = rng.integers(0, len(counts), (RESAMPLES, len(counts)))
    means = sums[questions].sum(axis=1) / counts[questions].sum(axis=1)
    low, high = np.percentile(means, (2.5, 97.5)).tolist()
    return low, high


def share_candidates(candidate: Answers, serving: Answers) -> tuple[np.ndarray, np.ndarray]:
    """Return both rank scores of the candidates that both retrieved, float32 [Q, C] each, at the first one's places.

    They are NaN where the serving generation did not retrieve the candidate.
    """
    scores = np.full((2, *candidate.candidates.shape), np.nan, np.float32)
    cells, other_cells = (np.nonzero(answers.candidates != PAD_ID) for answers in (candidate, serving))
    ids, item = np.unique(np.append(candidate.candidates[cells], serving.candidates[other_cells]), return_inverse=True)
    keys = np.append(cells[0], other_cells[0]) * len(ids) + item  # of question and item: one sort instead of one per question
    _, own_places, other_places = np.intersect1d(keys[: len(cells[0])], keys[len(cells[0]) :], return_indices=True)
    places = cells[0][own_places], cells[1][own_places]
    scores[0][places] = candidate.rank_scores[places]
    scores[1][places] = serving.rank_scores[other_cells[0][other_places], other_cells[1][other_places]]
    return scores[0], scores[1]


def find_rankable(scores: np.ndarray, hits: np.ndarray) -> np.ndarray:
    """Return which questions have the right item and another one among their scored candidates, bool [Q].

    scores: float [Q, C], NaN left out; hits: bool [Q, C]
    """
    return hits.any(axis=1) & (np.isfinite(scores).sum(axis=1) > 1)


def compute_ranking_aucs(scores: np.ndarray, hits: np.ndarray) -> np.ndarray:
    """Return the share of other candidates that score below the right one, ties a half: float64 [Q], NaN if not rankable.

    scores: float [Q, C], NaN left out; hits: bool [Q, C]
    """
    return auc(np.nan_to_num(scores), sp.csr_matrix(hits), sp.csr_matrix(np.isnan(scores)))


def measure_calibration_error(scores: np.ndarray, hits: np.ndarray) -> float:
    """Return the expected calibration error of the later questions by a mapping fitted on the earlier ones (Platt).

    scores: float [Q, C], NaN left out; hits: bool [Q, C]. Both parts hold half of the rankable questions, at least one each.
    The error is a share of the observed rate, because that rate falls with the number of candidates: 0 is perfect, and 1 is
    the error of predicting no hits.
    """
    middle = np.median(np.flatnonzero(find_rankable(scores, hits)))
    is_known = np.isfinite(scores)
    log_shares = log_softmax(np.where(is_known, scores.astype(np.float64), PAD_SCORE), axis=1)
    log_odds = log_shares - np.log(-np.expm1(np.minimum(log_shares, -1e-12)))
    earlier = np.arange(len(scores))[:, None] <= middle
    (fit_log_odds, fit_hits), (judged_log_odds, judged_hits) = (
        (log_odds[part][:, None], hits[part]) for part in (is_known & earlier, is_known & ~earlier)
    )
    return compute_binned_error(
        LogisticRegression().fit(fit_log_odds, fit_hits).predict_proba(judged_log_odds)[:, 1], judged_hits
    )


def compute_binned_error(chances: np.ndarray, hits: np.ndarray) -> float:
    """Return the sum over bins of |predicted - observed hits|, divided by all observed hits.

    chances: float64 [N]; hits: bool [N], with at least one. Bins follow each other by chance, and each expects as many hits.
    """
    order = np.argsort(chances, kind="stable")
    sums = np.cumsum(chances[order])
    before = sums - chances[order]
    bins = np.minimum((BINS * before / sums[-1]).astype(np.int64), BINS - 1)
    return float(np.abs(np.bincount(bins, chances[order] - hits[order])).sum() / hits.sum())
