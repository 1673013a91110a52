"""The copy of a repository that is measured without live state is whole: a server does not refuse it."""

from perf.live.shop import copy_repository
from repository.triton.models import read_repository, refuse_changed_manifests
from serving.contract.tensors import LIVE_MODELS


def test_a_copy_without_live_models_is_as_published(repository):
    with copy_repository(repository, live=False) as copy:
        refuse_changed_manifests(copy, 1)
        assert {model.name for model in read_repository(copy)} & set(LIVE_MODELS) == set()
    assert {model.name for model in read_repository(repository)} >= set(LIVE_MODELS)
