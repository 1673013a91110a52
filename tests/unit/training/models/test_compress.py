"""A smaller ranker is served as the settings name it, or the one before it that keeps enough."""

from dataclasses import replace

import numpy as np
import pytest

from tests.unit.training.models.conftest import QUIET
from training.models.compress import choose, compress, measure_kept_quality
from training.models.distill import STUDENT, macs
from training.models.ranking_data import Requests
from training.models.train_ranker import rank_scores_of, ranking_quality

SHORT = replace(STUDENT, epochs=1)


@pytest.mark.parametrize("compression", ["distilled", "pruned", "int8"])
def test_a_ranker_that_keeps_enough_is_served_as_the_settings_name_it(lesson, compression):
    got = compress(lesson, compression, SHORT, least_kept=0.0, **QUIET)
    assert got.compression == compression
    assert macs(got.model.shape) < macs(lesson.teacher.model.shape)


@pytest.mark.parametrize("compression", ["distilled", "pruned", "int8"])
def test_a_student_that_learned_too_little_is_not_served(lesson, compression):
    said = []
    untaught = replace(SHORT, learning_rate=0.0)
    assert compress(lesson, compression, untaught, report=said.append) is lesson.teacher
    assert said[-1] == "distilled ranker: that is too little, the DLRM itself is served"


def test_what_is_kept_is_a_share_with_its_interval(taught):
    teacher, _, validation = taught
    assert measure_kept_quality(teacher, teacher, validation) == (1.0, 0.0)
    worse = replace(teacher, blend=-50.0)
    kept, doubt = measure_kept_quality(worse, teacher, validation)
    assert kept == pytest.approx(quality_of(worse, validation) / quality_of(teacher, validation))
    assert kept < 1.0
    assert 0.0 < doubt < 1.0


def quality_of(ranker, requests: Requests) -> float:
    return sum(ranking_quality(rank_scores_of(ranker, requests), requests.taken).values())


def test_what_keeps_too_little_leaves_the_ranker_before_it(lesson):
    student = replace(lesson.teacher, compression="distilled")
    worse = replace(lesson.teacher, blend=-50.0, compression="int8")
    said = []
    assert choose(student, lesson.teacher, lesson, said.append) is student
    assert choose(worse, student, lesson, said.append) is student
    assert said[-1] == "int8 ranker: that is too little, the distilled one is served"


def test_one_request_shows_nothing(taught):
    teacher, _, validation = taught
    found = validation.take(np.flatnonzero(validation.taken.any(axis=1))[:1])
    assert measure_kept_quality(replace(teacher, blend=-50.0), teacher, found)[1] == np.inf
    assert measure_kept_quality(teacher, teacher, replace(found, taken=np.zeros_like(found.taken))) == (1.0, np.inf)
