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
from tritonclient.grpc import service_pb2_grpc

from serving.contract import ids
from serving.contract import tensors as contract
from serving.contract.ids import session_id as session_id_of_server
from tests.present import present
from training.dataset.ids import stable_id as export_id
from triton_recommender import session_id, stable_id, tensors

CLIENT = Path(__file__).parents[3] / "clients" / "triton_recommender"


def test_reserved_values_are_those_of_the_contract():
    for name in ("PAD_ID", "FROM_STORE", "MISSING_INT", "PROBE_USER_ID"):
        assert getattr(tensors, name) == getattr(contract, name)
    assert (contract.ENSEMBLE, ids.NAME) == (tensors.RECOMMEND, tensors.NAME)
    for bit in contract.Degraded:
        assert tensors.Degraded[present(bit.name)] == bit
    for source in contract.Sources:
        assert tensors.Sources[present(source.name)] == source


def test_ids_of_any_text_are_those_of_the_export():
    """test_calling.py has the ids that docs/calling.md states."""
    rng = np.random.default_rng(0)
    texts = ["", *("".join(map(chr, rng.integers(32, 0x2FFF, rng.integers(1, 30)))) for _ in range(1_000))]
    for attempt in range(3):
        assert [stable_id(text, attempt) for text in texts] == [export_id(text, attempt) for text in texts]


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


def test_the_oldest_grpcio_that_is_declared_loads_the_stubs_of_the_oldest_tritonclient():
    """They refuse an older one when they are imported. The pinned tritonclient is the oldest that is declared."""
    declared = tomllib.loads((CLIENT.parent / "pyproject.toml").read_text())["project"]["dependencies"]
    oldest = {normalise(requirement): requirement.partition(">=")[2] for requirement in declared}
    assert metadata.version("tritonclient").startswith(oldest["tritonclient"])
    needed, given = (
        tuple(map(int, version.split("."))) for version in (service_pb2_grpc.GRPC_GENERATED_VERSION, oldest["grpcio"])
    )
    assert given >= needed[: len(given)]


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
