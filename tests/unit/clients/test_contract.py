"""The client has a copy of the contract, which it does not import: both must be equal."""

from __future__ import annotations

import ast
import itertools
import re
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest

from serving.contract import ids
from serving.contract import tensors as contract
from serving.contract.ids import session_id as session_id_of_server
from tests.present import present
from training.dataset.ids import stable_id as export_id
from triton_recommender import session_id, stable_id, tensors

CLIENT = Path(__file__).parents[3] / "clients" / "triton_recommender"
KNOWN_IDS: dict[tuple[str, int], int] = {  # (text, attempt) -> id
    ("", 0): 8044937785282358,
    ("7", 0): 8138597842145041,
    ("007", 0): 2574300389285264,
    ("A-17", 0): 8173670769573730,
    ("SKU/0010-x", 0): 4686929118119057,
    ("café", 0): 3077482977047130,
    ("日本", 0): 8169812601350803,
    ("anna", 0): 7327757948776585,
    ("anna", 1): 2797375885431950,
    ("anna", 2): 3758441528454437,
}


def test_reserved_values_are_those_of_the_contract():
    for name in ("PAD_ID", "FROM_STORE", "MISSING_INT", "PROBE_USER_ID"):
        assert getattr(tensors, name) == getattr(contract, name)
    assert (contract.ENSEMBLE, ids.NAME) == (tensors.RECOMMEND, tensors.NAME)
    for bit in contract.Degraded:
        assert tensors.Degraded[present(bit.name)] == bit
    for source in contract.Sources:
        assert tensors.Sources[present(source.name)] == source


@pytest.mark.parametrize(("text", "attempt"), KNOWN_IDS)
def test_ids_of_texts_are_those_of_the_export(text, attempt):
    assert stable_id(text, attempt) == export_id(text, attempt) == KNOWN_IDS[text, attempt]


def test_ids_of_any_text_are_those_of_the_export():
    rng = np.random.default_rng(0)
    texts = ["".join(map(chr, rng.integers(32, 0x2FFF, rng.integers(1, 30)))) for _ in range(1_000)]
    assert [stable_id(text) for text in texts] == [export_id(text) for text in texts]


def test_the_package_imports_what_it_declares_and_nothing_else():
    project = tomllib.loads((CLIENT.parent / "pyproject.toml").read_text())["project"]
    declared = {
        normalise(name) for name in itertools.chain(project["dependencies"], *project["optional-dependencies"].values())
    }
    installed = metadata.packages_distributions()
    dependencies = {module for module, names in installed.items() if declared & {normalise(name) for name in names}}
    assert "numpy" in dependencies
    for path in CLIENT.rglob("*.py"):
        names = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                names.add(present(node.module).split(".")[0])
        assert names <= {"triton_recommender", *dependencies, *sys.stdlib_module_names}, path


def test_the_installation_has_every_package_and_says_that_it_is_typed():
    tool = tomllib.loads((CLIENT.parent / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = {path.parent.relative_to(CLIENT.parent) for path in CLIENT.rglob("__init__.py")}
    assert set(tool["packages"]) == {".".join(folder.parts) for folder in folders}
    assert all((CLIENT / name).is_file() for name in tool["package-data"][CLIENT.name])
    assert "py.typed" in tool["package-data"][CLIENT.name]


def normalise(requirement: str) -> str:
    """Return the name of a package, without extras and version, as registries write it."""
    return re.split(r"[\[<>=~! ]", requirement)[0].lower().replace("_", "-")


def test_the_error_tree_is_drawn_as_it_is():
    from triton_recommender import errors

    classes = {name: value for name, value in vars(errors).items() if isinstance(value, type)}
    drawn = re.findall(r"[├└]── (\w+)", errors.__doc__)
    assert sorted([*drawn, "RecommenderError"]) == sorted(classes)
    assert all(issubclass(found, errors.RecommenderError) for found in classes.values())


@pytest.mark.parametrize("session", ["a3f9", "", "Besuch-ä-7"])
def test_a_session_has_one_id_in_client_and_server(session):
    assert session_id(session) == session_id_of_server(session)
