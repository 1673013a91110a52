"""A smaller ranker is served only if it keeps enough of the teacher's quality; otherwise the ranker before it is."""

from dataclasses import replace

import numpy as np
import pytest

from tests.long.training.models.conftest import QUIET
from training.models.rankers.ranking_data import Requests
from training.models.rankers.train_ranker import compute_rank_scores, measure_ranking_quality
from training.models.student import compress as compress_module
from training.models.student.compress import choose_ranker, compress, measure_kept_quality
from training.models.student.distill import STUDENT, count_macs

SHORT = replace(STUDENT, epochs=1)


@pytest.mark.parametrize("compression", ["distilled", "pruned", "int8"])
def test_a_ranker_that_keeps_enough_is_served_as_the_settings_name_it(lesson, compression, monkeypatch):
    monkeypatch.setattr(compress_module, "LEAST_KEPT", 0.0)
    monkeypatch.setattr(compress_module, "LEAST_MEASURED", 0.0)
    ranker = compress(lesson, compression, SHORT, **QUIET)
    assert ranker.compression == compression
    assert count_macs(ranker.model.shape) < count_macs(lesson.teacher.model.shape)


@pytest.mark.parametrize("compression", ["distilled", "pruned", "int8"])
def test_a_student_that_learned_too_little_is_not_served(lesson, compression):
    messages: list[str] = []
    untaught = replace(SHORT, learning_rate=0.0)
    assert compress(lesson, compression, untaught, report=messages.append) is lesson.teacher
    assert messages[-1] == "distilled ranker: that is too little, the DLRM itself is served"


def test_the_kept_quality_is_a_share_with_its_confidence_interval(taught):
    teacher, _, validation = taught
    assert measure_kept_quality(teacher, teacher, validation) == (1.0, 0.0)
    worse = replace(teacher, blend=-50.0)
    kept, half_interval = measure_kept_quality(worse, teacher, validation)
    assert kept == pytest.approx(measure_quality(worse, validation) / measure_quality(teacher, validation))
    assert kept < 1.0
    assert 0.0 < half_interval < 1.0


def measure_quality(ranker, requests: Requests) -> float:
    return sum(measure_ranking_quality(compute_rank_scores(ranker, requests), requests.taken).values())


def test_where_a_ranker_keeps_too_little_the_one_before_it_is_served(lesson):
    student = replace(lesson.teacher, compression="distilled")
    worse = replace(lesson.teacher, blend=-50.0, compression="int8")
    messages: list[str] = []
    assert choose_ranker(student, lesson.teacher, lesson, messages.append) is student
    assert choose_ranker(worse, student, lesson, messages.append) is student
    assert messages[-1] == "int8 ranker: that is too little, the distilled one is served"


def test_one_request_gives_no_confidence_interval(taught):
    teacher, _, validation = taught
    one_request = validation.take(np.flatnonzero(validation.taken.any(axis=1))[:1])
    assert measure_kept_quality(replace(teacher, blend=-50.0), teacher, one_request)[1] == np.inf
    nothing_taken = replace(one_request, taken=np.zeros_like(one_request.taken))
    assert measure_kept_quality(teacher, teacher, nothing_taken) == (1.0, np.inf)
