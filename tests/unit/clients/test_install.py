"""`pip install ./clients` gives a typed package that works without the rest of the checkout."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from repository.triton.code import PROJECT

PROGRAM = """
import sys, triton_recommender, triton_recommender.cache, triton_recommender.transports
from triton_recommender import Recommender
from triton_recommender.testing import FakeRecommender
answer = FakeRecommender(lambda query: [3, 1]).recommend(user_id=7, k=2)
print(triton_recommender.__version__, list(answer.item_ids))
print(sorted(name for name in sys.modules if name.split(".")[0] in {"serving", "repository", "server", "training", "clients"}))
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """A folder with the package. Its dependencies are those of this environment, because tests have no network."""
    folder = tmp_path_factory.mktemp("installed")
    shutil.copytree(PROJECT / "clients", folder / "source", ignore=shutil.ignore_patterns("__pycache__", "build", "*.egg-info"))
    build = "import sys; from setuptools import build_meta; print(build_meta.build_wheel(sys.argv[1]))"
    built = subprocess.run(
        [sys.executable, "-c", build, str(folder)], cwd=folder / "source", capture_output=True, text=True, timeout=120
    )
    assert built.returncode == 0, built.stderr
    assert "deprecated" not in built.stderr, built.stderr  # a later setuptools would refuse what this one warns of
    (wheel,) = folder.glob("*.whl")
    shutil.unpack_archive(wheel, folder / "packages", format="zip")
    return folder / "packages"


def test_the_installed_package_answers_without_the_checkout(installed):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=installed,
        env={"PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    (info,) = installed.glob("*.dist-info")
    answered, others = done.stdout.splitlines()
    assert answered == f"{info.stem.rpartition('-')[2]} [3, 1]"
    assert others == "[]"


def test_the_installed_package_carries_its_licence(installed):
    (licence,) = installed.glob("*.dist-info/**/LICENSE")
    assert licence.read_text() == (PROJECT / "LICENSE").read_text()


def test_the_installed_package_is_whole_and_typed(installed):
    source = PROJECT / "clients" / "triton_recommender"
    expected = {path.relative_to(source) for path in source.rglob("*.py")} | {Path("py.typed")}
    package = installed / "triton_recommender"
    assert {path.relative_to(package) for path in package.rglob("*") if path.is_file() and path.suffix != ".pyc"} == expected


def test_the_installed_package_names_small_dependencies_only(installed):
    (metadata,) = installed.glob("*.dist-info/METADATA")
    required = [
        line for line in metadata.read_text().splitlines() if line.startswith("Requires-Dist") and "extra ==" not in line
    ]
    names = {line.split()[1].partition(">")[0].partition("[")[0] for line in required}
    assert names == {"numpy", "tritonclient", "grpcio", "aiohttp", "cachetools", "urllib3"}
