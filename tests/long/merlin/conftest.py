from __future__ import annotations

from pathlib import Path

import pytest

from tests import repositories


@pytest.fixture(scope="session")
def cpu() -> Path:
    return repositories.small_repository()
