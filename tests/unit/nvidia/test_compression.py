"""The merlin profile serves the smaller rankers that it can, and refuses the others."""

import pytest

from export.profiles import load_profile
from export.settings import Settings
from repository.publish import Staging
from serving.contract.errors import ConfigError


def refuse_early(repository, settings: Settings) -> None:
    load_profile("merlin").refuse_early(repository, Staging(repository), {}, settings)


def test_a_network_for_onnx_runtime_is_refused_before_training(tmp_path):
    with pytest.raises(ConfigError, match=r'compression is "int8".*serves "none", "distilled" and "pruned"\. Set one of them'):
        refuse_early(tmp_path, Settings.model_validate({"ranker": {"compression": "int8"}}))


@pytest.mark.parametrize("compression", ["none", "distilled", "pruned"])
def test_others_are_served(tmp_path, compression):
    refuse_early(tmp_path, Settings.model_validate({"ranker": {"compression": compression}}))
