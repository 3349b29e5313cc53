"""Imports point one way, and start-up stays light."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import cascadeseg

PACKAGE = Path(cascadeseg.__file__).parent
LAYERS = [
    {"_version", "errors", "labels", "geometry", "atomic", "machine", "memory", "parallel"},
    {"config", "formats", "network", "synthesis", "weights"},
    {"cascade"},
    {"training", "evaluation"},
    {"outputs", "demo", "terminal", "batch", "cli", "__init__", "__main__"},
]
HEIGHT = {name: height for height, layer in enumerate(LAYERS) for name in layer}
FILES = sorted(PACKAGE.rglob("*.py"))


def part(path: Path) -> str:
    """The module or subpackage directly below the package that a file belongs to."""
    first = path.relative_to(PACKAGE).parts[0]
    return first.removesuffix(".py")


def imported(path: Path) -> set[str]:
    """The parts of the package that a file imports, wherever it does."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        modules = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module:
            modules = [f"{node.module}.{a.name}" if node.module == "cascadeseg" else node.module for a in node.names]
        names |= {module.split(".")[1] for module in modules if module.startswith("cascadeseg.")}
    return names & HEIGHT.keys()


@pytest.mark.parametrize("path", FILES, ids=[str(path.relative_to(PACKAGE)) for path in FILES])
def test_imports_point_one_way(path):
    assert part(path) in HEIGHT, f"{path.name}: give its part a layer"
    upward = {name for name in imported(path) if HEIGHT[name] > HEIGHT[part(path)]}
    assert not upward, f"{path.relative_to(PACKAGE)} imports {upward} from above"


@pytest.mark.parametrize(
    ("statement", "unwanted"),
    [
        ("import cascadeseg, cascadeseg.cli", {"torch", "monai", "nibabel", "SimpleITK", "pydicom", "numpy", "scipy"}),
        ("import cascadeseg.cascade.pipeline", {"monai", "scipy", "matplotlib", "SimpleITK", "pydicom", "nibabel"}),
        ("import cascadeseg.formats.itk", {"torch", "monai", "scipy", "matplotlib", "pydicom", "nibabel"}),
        (
            "import cascadeseg.evaluation.report",
            {"torch", "monai", "scipy", "matplotlib", "SimpleITK", "pydicom", "nibabel"},
        ),
        ("import cascadeseg.training.loop", {"monai", "scipy", "matplotlib", "SimpleITK", "pydicom", "nibabel"}),
    ],
)
def test_importing_loads_no_more_than_it_needs(statement, unwanted):
    code = f"{statement}\nimport sys\nprint(*({unwanted!r} & set(sys.modules)))"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert output.split() == []


ENDS = {("cli.py", "SystemExit"), ("cli.py", "_exit"), ("batch.py", "_exit"), ("training/cache.py", "_exit")}
"""Where a process may end: the program itself, and processes of its own."""


def called(node: ast.AST) -> str:
    """The name, without its module, of what a node calls or raises; else an empty one."""
    what = node.func if isinstance(node, ast.Call) else node.exc if isinstance(node, ast.Raise) else None
    return getattr(what, "id", "") or getattr(what, "attr", "")


@pytest.mark.parametrize(
    ("code", "name"),
    [
        ("print(1)", "print"),
        ("sys.exit(1)", "exit"),
        ("os._exit(1)", "_exit"),
        ("raise SystemExit", "SystemExit"),
        ("raise SystemExit(1)", "SystemExit"),
    ],
)
def test_a_call_is_known_by_its_name(code, name):
    assert {called(node) for node in ast.walk(ast.parse(code))} - {""} == {name}


def test_nothing_is_printed_asserted_or_exited_in_the_package():
    for path in FILES:
        nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
        assert not any(isinstance(node, ast.Assert) for node in nodes), path
        names = {called(node) for node in nodes}
        assert not names & {"print", "breakpoint"}, path
        ends = {
            (path.relative_to(PACKAGE).as_posix(), name) for name in names & {"exit", "quit", "_exit", "SystemExit"}
        }
        assert ends <= ENDS, path
