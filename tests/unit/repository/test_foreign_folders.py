"""A repository is published only where tritonserver finds nothing but models."""

from __future__ import annotations

import pytest

from repository.publish import Staging
from serving.contract.errors import ExportError


def test_a_folder_with_others_that_are_no_models_is_refused_before_training(tmp_path):
    """A home, say, or the checkout: the generation would be published, and no server would start on it."""
    for name in ("photos", "rank", "own"):  # a killed publication may have left `rank`; `own` is a model of the shop's
        (tmp_path / name).mkdir()
    (tmp_path / "own" / "config.pbtxt").write_text('name: "own"')
    with (
        pytest.raises(ExportError, match=r"holds folders that are no models: photos\. .*choose another REPO"),
        Staging(tmp_path),
    ):
        pass
    (tmp_path / "photos").rmdir()
    with Staging(tmp_path) as staging:
        assert staging.generation == 1
