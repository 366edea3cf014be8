"""Imports point one way, and the engine knows no drafter and no round by name."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "src" / "paceline"
ENGINE = {"core", "network", "attention", "kv", "drafters", "rounds"}
WORKERS = {"draft_worker", "stage_worker", "rank_worker", "cluster"}
ALLOWED = {  # part -> the parts it may import; every part may import itself
    "core": set(),
    "native": set(),
    "network": {"core", "attention", "kv", "native", "zoo"},
    "attention": {"core"},
    "kv": {"core", "native", "attention"},
    "training": {"core", "network", "attention", "kv"},
    "drafters": {"core", "native", "network", "attention", "kv"},
    "rounds": {"core", "network", "attention", "kv", "drafters", "planning"},
    "grammar": {"core"},
    "engine": {*ENGINE, "native", "grammar"},
    "published": set(),
    "zoo": {"core", "published"},
    "planning": {"core", "network"},
    "distributed": {"core", "native", "network", "attention", "kv", "drafters"},
    "options": {"core"},
    "config": {"options", "distributed", "core", "network", "attention", "drafters", "rounds", "engine", "planning"},
    "assembly": {"config", *ENGINE, "engine", "grammar", "planning", "zoo"},
    "cluster": {"config", "core", "distributed", "drafters", "rounds"},
    "draft_worker": {
        *{"cluster", "config", "assembly", "distributed", "core", "network", "drafters", "rounds"},
        *{"grammar", "rank_worker"},
    },
    "stage_worker": {"cluster", "rank_worker", "config", "assembly", "distributed", "native", *ENGINE - {"attention"}},
    "rank_worker": {"cluster", "config", "assembly", "distributed", "core", "network", "rounds"},
    "engine_worker": {"chunks", "config", "core", "distributed", "drafters", "engine", "llm", "network"},
    "serve": {"core", "distributed", "options"},
    "chunks": {"core", "engine"},
    "learning": {"core", "config", "assembly", "network", "drafters", "engine"},
    "llm": {*ENGINE, "native", "zoo", "options", "config", "assembly", *WORKERS, "learning", "chunks", "engine"},
    "async_llm": {"config", "chunks", "core", "engine", "llm"},
    "bridges": {"core", "network", "drafters"},
    "bench": {*ENGINE, "native", "distributed", "training", "engine", "zoo", "planning", "config", "assembly", "llm"},
    "adapt": {
        *{"core", "network", "drafters", "training", "engine", "zoo", "planning", "options", "config", "llm", "bench"},
        "learning",
    },
    "cli": {
        *ENGINE,
        "adapt",
        "bridges",
        "distributed",
        "training",
        "engine",
        "published",
        "zoo",
        "planning",
        "options",
        "config",
        "assembly",
        "stage_worker",
        "llm",
        "bench",
        "serve",
    },
}
# Of drafters: how one is trained. These alone may import training.
RECIPES = {"recipe.py", "distillation.py", "prefixes.py", "start.py", "unrolled.py"}
# Circles that are still there, by package; no other may appear.
CIRCLES = {
    "drafters": [{"base", "sessions"}],
    # A configuration makes the round, which reads it.
    "rounds": [{"mirror.config", "mirror.round"}, {"pipeline.config", "pipeline.round"}],
}
CONTRACTS = {"base", "registry"}  # what the engine may import of drafters and rounds
PYDANTIC = {"pydantic", "pydantic_core", "typing_extensions"}  # it, and what it is made of
MODULES = sorted(PACKAGE.rglob("*.py"))
STUDIES = PACKAGE.parents[1] / "studies"
PARTS = {
    "streaming": "speculative_streaming",
    "lyanna_parts": "lyanna",
    "spire_parts": "spire",
    "mirror_parts": "mirror",
    "specpipe_parts": "specpipe",
    "micro_parts": "micro",
}  # folder of studies -> the study, too long for a file, whose parts it holds
KIT = "kit"  # folder of studies that all of them may import
NAMES = {path.stem for path in STUDIES.glob("*.py")} | {"studies", *PARTS}
ABOVE = {"cli", "async_llm"}  # parts that no study may import


def imports(path: Path, root: Path | None = None) -> Iterator[tuple[str, ...]]:
    """Absolute dotted names that a module imports, as tuples; relative ones resolved.

    Imports within functions and those for type checkers count as well.
    """
    module = ("paceline", *path.relative_to(root or PACKAGE).with_suffix("").parts)
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (tuple(alias.name.split(".")) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = (*module[: -node.level], *(node.module or "").split(".")) if node.level else ()
            base = base or tuple((node.module or "").split("."))
            yield from (tuple(filter(None, (*base, alias.name))) for alias in node.names)


def part(path: Path) -> str:
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_one_way(path: Path) -> None:
    own = part(path)
    if own in ("__init__", "__main__"):  # the package's own front door
        return
    found = {name[1] for name in imports(path) if name[0] == "paceline" and len(name) > 1}
    assert own in ALLOWED, f"{own} has no place in the layout: add it to ALLOWED"
    allowed = ALLOWED[own] | ({"training"} if own == "drafters" and path.name in RECIPES else set())
    assert found - {own, "__version__"} <= allowed


def test_no_two_parts_may_import_each_other() -> None:
    assert not [(a, b) for a, allowed in ALLOWED.items() for b in allowed if a in ALLOWED.get(b, ())]


def circles(files: dict[str, set[str]]) -> list[set[str]]:
    """The groups of files that import one another, directly or through others of the group."""
    reached = {name: set(found) for name, found in files.items()}
    for middle in files:
        for found in reached.values():
            found |= reached[middle] if middle in found else set()
    groups = {frozenset(b for b in found if name in reached[b]) for name, found in reached.items()}
    return [set(group) for group in groups if len(group) > 1]


@pytest.mark.parametrize("package", sorted({part(path) for path in MODULES if path.parent != PACKAGE}))
def test_no_files_of_a_package_import_each_other_in_a_circle(package: str) -> None:
    """Names of files are dotted paths within the package."""
    paths = {
        path.relative_to(PACKAGE / package).with_suffix("").parts: path for path in MODULES if part(path) == package
    }
    files: dict[str, set[str]] = {}
    for own, path in paths.items():
        inside = {name[2:] for name in imports(path) if name[:2] == ("paceline", package)}
        named = {name if name in paths else name[:-1] for name in inside}
        files[".".join(own)] = {".".join(name) for name in named if name in paths and name != own}
    assert [group for group in circles(files) if group not in CIRCLES.get(package, [])] == []


def test_the_checker_sees_circles_of_two_and_of_three() -> None:
    files = {"a": {"b"}, "b": {"a", "c"}, "c": {"d"}, "d": {"e"}, "e": {"c"}, "f": {"a"}}
    assert sorted(map(sorted, circles(files))) == [["a", "b"], ["c", "d", "e"]]


@pytest.mark.parametrize("path", [p for p in MODULES if part(p) == "core"], ids=lambda path: path.name)
def test_core_imports_torch_pydantic_and_the_standard_library_only(path: Path) -> None:
    import sys

    roots = {name[0] for name in imports(path)}
    assert roots - sys.stdlib_module_names <= {"torch", "paceline", *PYDANTIC}


@pytest.mark.parametrize("path", [p for p in MODULES if part(p) == "engine"], ids=lambda path: path.name)
def test_engine_imports_no_concrete_drafter_or_round(path: Path) -> None:
    found = {name[2] for name in imports(path) if name[:2] in {("paceline", "drafters"), ("paceline", "rounds")}}
    assert found <= CONTRACTS


@pytest.mark.parametrize("path", sorted(STUDIES.rglob("*.py")), ids=lambda path: str(path.relative_to(STUDIES)))
def test_studies_stand_on_the_kit_and_the_bench_and_on_each_other_not(path: Path) -> None:
    folder = path.relative_to(STUDIES).parts[0]
    own = {part for part, study in PARTS.items() if path.stem == study or folder == part}
    found = {name for name in imports(path, STUDIES) if name[0] in {"paceline", KIT, *NAMES}}
    assert found or path.name == "__init__.py" or folder == KIT
    assert not {name for name in found if name[0] in NAMES - own}
    assert not {name[1] for name in found if len(name) > 1} & ABOVE


@pytest.mark.parametrize("name", [*PARTS, KIT])
def test_studies_import_paceline_before_torch(name: str) -> None:
    """It tells torch's threads not to spin, which they read when torch is loaded."""
    assert ("paceline",) in imports(STUDIES / name / "__init__.py", STUDIES)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_part_imports_a_study(path: Path) -> None:
    assert not {name[0] for name in imports(path)} & {KIT, *NAMES}


def test_the_checker_sees_relative_and_absolute_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.PACKAGE", tmp_path)
    (tmp_path / "core").mkdir()
    module = tmp_path / "core" / "bad.py"
    lines = (
        "import numpy.linalg",
        "from paceline.engine import engine",
        "from ..kv.pool import Pool",
        "from . import x",
    )
    module.write_text("\n".join(lines))
    assert set(imports(module)) == {
        ("numpy", "linalg"),
        ("paceline", "engine", "engine"),
        ("paceline", "kv", "pool", "Pool"),
        ("paceline", "core", "x"),
    }
