"""Imports run one way: what serves imports nothing of what trains, and documents name what exists."""

import ast
import re
import subprocess
import sys
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

PROJECT = Path(__file__).parents[2]
OFFLINE_LIBRARIES = {
    "torch",
    "pandas",
    "nvtabular",
    "merlin",
    "dask",
    "sklearn",
    "matplotlib",
    "rich",
    "typer",
    "pydantic",
}
SERVING = {
    "serving",  # for its effect: it has no content
    *("serving.contract", "serving.loops", "serving.tables", "serving.live", "serving.stages", "serving.pipeline"),
}
MAY_IMPORT = {  # package: the other packages of this project that it may import
    "serving.contract": set(),
    "serving.loops": {"serving.contract"},
    "serving.tables": {"serving.contract", "serving.loops"},
    "serving.live": {"serving.contract", "serving.loops"},
    "serving.stages": SERVING - {"serving.pipeline"},
    "serving.pipeline": SERVING,
    "hps_config": SERVING | {"repository"},
    "repository": SERVING,
    "live": SERVING,
    "trials": SERVING | {"live", "repository"},
    "training": SERVING,
    "server": SERVING | {"repository"},
    "gateway": SERVING | {"clients", "live", "trials", "repository"},
    "clients": set(),
    "export": SERVING | {"hps_config", "repository", "training", "server", "live", "trials"},
    "perf": SERVING | {"repository", "training", "server", "export"},
    "experiments": SERVING | {"repository", "training", "server", "export", "clients", "live", "perf", "trials"},
}
BESIDE = ("serving.stages.live.models", "server.watch", "live.__main__", "trials.__main__", "gateway.__main__")
PACKAGES = {name.split(".")[0] for name in MAY_IMPORT} | {"tests", "triton_recommender"}


def files_of(package: str) -> list[Path]:
    path = PROJECT / package.replace(".", "/")
    return sorted(path.rglob("*.py")) if path.is_dir() else [path.with_suffix(".py")]


class Source(NamedTuple):
    """The facts that the tests need of a file, without its syntax tree, which would slow each garbage collection that follows.

    imports: modules that it imports, wherever in it; `from a import b` counts as `a`
    run: the same where they are not for annotations only, with `a.b` beside each `a`
    compared: its comparisons with constants, each as (constants, code)
    """

    imports: set[str]
    run: list[tuple[str, set[str]]]
    compared: list[tuple[set, str]]


@cache
def read_source(path: Path) -> Source:
    source = Source(set(), [], [])

    def visit(node: ast.AST, runs: bool) -> None:
        found: list[tuple[str, set[str]]] = []
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            runs = False
        elif isinstance(node, ast.Import):
            found = [(alias.name, set()) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found = [(node.module, {f"{node.module}.{alias.name}" for alias in node.names})]
        elif isinstance(node, ast.Compare):
            constants = {part.value for part in (node.left, *node.comparators) if isinstance(part, ast.Constant)}
            if constants:
                source.compared.append((constants, ast.unparse(node)))
        source.imports.update(name for name, _ in found)
        if runs:
            source.run.extend(found)
        for child in ast.iter_child_nodes(node):
            visit(child, runs)

    visit(ast.parse(path.read_text()), True)
    return source


def package_of(module: str) -> str:
    first, *rest = module.replace("triton_recommender", "clients", 1).split(".")  # that folder is on the path
    return f"{first}.{rest[0]}" if first == "serving" and rest else first


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_imports_run_one_way(package):
    allowed = MAY_IMPORT[package] | {package}
    for path in files_of(package):
        packages = {package_of(name) for name in read_source(path).imports}
        assert {name for name in packages if name.split(".")[0] in PACKAGES} <= allowed, path


def imported_modules(path: Path, modules: set[str]) -> set[str]:
    """Return those of `modules` that a file imports when it runs: wherever in it, but not for annotations only."""
    found = (names & modules or {name} for name, names in read_source(path).run)
    return set[str]().union(*found) & modules


@pytest.fixture(scope="module")
def module_imports() -> dict[str, set[str]]:
    """Return module -> the modules that it imports, over all packages."""
    paths = {path for package in MAY_IMPORT for path in files_of(package) if path.is_file()}
    modules = {".".join(path.relative_to(PROJECT).with_suffix("").parts).removesuffix(".__init__"): path for path in paths}
    return {name: imported_modules(path, set(modules)) for name, path in modules.items()}


@pytest.mark.parametrize("depth", [2, 3, 4, 5])
def test_neither_modules_nor_sub_packages_import_each_other_in_a_circle(module_imports, depth):
    """Names cut to `depth` parts: 2 is `export.nvidia`, 3 is `serving.tables.store`, 5 is every module."""

    def cut(name: str) -> str:
        return ".".join(name.split(".")[:depth])

    graph: dict[str, set[str]] = {}
    for name, imports in module_imports.items():
        graph.setdefault(cut(name), set()).update({cut(other) for other in imports} - {cut(name)})
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle


def test_only_the_table_of_profiles_names_their_plug_ins():
    """All other code asks `load_profile`; only a profile's own code knows which one it is."""
    plugins = {"export.cpu", "export.nvidia.profile"}
    others = [path for package in MAY_IMPORT for path in files_of(package) if path.is_file()]
    assert [path for path in others if read_source(path).imports & plugins] == []


def test_nothing_branches_on_the_name_of_a_profile():
    """Code outside the profiles asks the object that `load_profile` returns, instead of comparing names of profiles."""
    names = {"cpu", "merlin"}
    for path in (path for package in MAY_IMPORT for path in files_of(package) if path.is_file()):
        for constants, code in read_source(path).compared:
            assert not names & constants, (path, code)


def test_what_serves_imports_no_training_library():
    for path in files_of("serving"):
        assert not {name.split(".")[0] for name in read_source(path).imports} & OFFLINE_LIBRARIES, path


def test_loading_the_pipeline_loads_no_training_library():
    code = "import sys, serving.pipeline; print(*{name.split('.')[0] for name in sys.modules})"
    loaded = set(subprocess.check_output([sys.executable, "-c", code], cwd=PROJECT, text=True).split())
    assert "numpy" in loaded
    assert not loaded & OFFLINE_LIBRARIES


def test_what_writes_events_or_runs_beside_a_server_does_without_the_compiler_and_what_only_trains():
    """The compiler would take each of these processes 60 MB, and the stages a gateway half a second at its start.

    An installation of requirements/serve.txt has neither scipy nor pandas.
    """
    code = f"import sys; sys.modules |= dict.fromkeys(['scipy', 'pandas']); import {', '.join(BESIDE)}; print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], cwd=PROJECT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    loaded = set(run.stdout.split())
    assert {"lmdb", "gateway.app", "gateway.answers.explain", "trials.guard", "trials.sequential"} <= loaded
    assert not {"numba", "llvmlite", "serving.pipeline"} & loaded
    assert not {name for name in loaded if name.startswith(("scipy.", "pandas."))}


def documents() -> list[str]:
    """Return the paths of the project's Markdown files."""
    folders = [path for path in PROJECT.iterdir() if path.is_dir() and path.name[0] != "." and path.name != "shared"]
    paths = [*PROJECT.glob("*.md"), *(path for folder in folders for path in folder.rglob("*.md"))]
    return sorted(str(path.relative_to(PROJECT)) for path in paths)


def anchors_of(document: Path) -> set[str]:
    """Return the anchors of a document's headings, as GitHub names them."""
    headings = re.findall(r"^#+ (.+)$", document.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_relative_link_of_a_document_leads_somewhere():
    broken = []
    for name in documents():
        document = PROJECT / name
        prose = re.sub(r"```.*?```", "", document.read_text(), flags=re.DOTALL)
        for path, anchor in re.findall(r"\]\((?![a-z]+:)([^)#\s]*)(?:#([^)\s]+))?\)", prose):
            target = document.parent / path if path else document
            if not target.exists() or (anchor and anchor not in anchors_of(target)):
                broken.append(f"{name}: {path}#{anchor}")
    assert broken == []


def test_every_make_target_and_variable_that_a_document_names_exists():
    makefile = (PROJECT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    variables = set(re.findall(r"\$\(([A-Z_]+)\)", makefile))
    for name in documents():
        if name == "CHANGELOG.md":
            continue
        calls = re.findall(r"(?:^|`|&& )make ([a-z-]+)((?: +[A-Z_]+=[^\s`]+)*)", (PROJECT / name).read_text(), re.MULTILINE)
        named = {target for target, _ in calls}
        assert named - targets == set(), name
        assert {variable for _, given in calls for variable in re.findall(r"([A-Z_]+)=", given)} - variables == set(), name
        assert name != "README.md" or {"run", "test", "export", "serve", "check", "stop", "eval"} <= named


def test_every_test_that_a_document_names_exists():
    """A name may be cut short, as in `test_answers…`."""
    paths = list((PROJECT / "tests").rglob("*.py"))
    known = {name for path in paths for name in re.findall(r"(?:def|class) (test_\w+|Test\w+)", path.read_text())}
    known |= {path.stem for path in paths}
    texts = [(PROJECT / name).read_text() for name in documents() if name != "CHANGELOG.md"]
    named = {name for text in texts for name in re.findall(r"\b(?:test_\w+|Test[A-Z]\w+)", text)}
    assert named
    assert [name for name in named if not any(each.startswith(name) for each in known)] == []


def test_the_readme_is_short():
    assert len((PROJECT / "README.md").read_text().splitlines()) <= 150


def test_the_glossary_is_short():
    rows = re.findall(r"^\| .+ \|$", (PROJECT / "docs" / "glossary.md").read_text(), re.MULTILINE)
    assert 1 < len(rows) <= 1 + 20  # a heading and the terms
    assert [row for row in rows if "," in row.split("|")[1]] == []  # one term a row


def test_the_readme_has_no_blanks_left():
    assert re.findall(r"@[A-Z_]+@", (PROJECT / "README.md").read_text()) == []
