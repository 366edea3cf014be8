"""Studies stand on the kit and the bench; `lint-imports` checks the imports of the package itself."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

STUDIES = Path(__file__).resolve().parents[2] / "studies"
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
ABOVE = {"paceline.cli", "paceline.api.async_llm"}  # what no study may import


def imports(path: Path) -> set[str]:
    """Absolute names of the modules that a study imports, anywhere in it."""
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    whole = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return whole | {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom) and not node.level}


@pytest.mark.parametrize("path", sorted(STUDIES.rglob("*.py")), ids=lambda path: str(path.relative_to(STUDIES)))
def test_studies_import_the_package_and_the_kit_and_not_each_other(path: Path) -> None:
    folder = path.relative_to(STUDIES).parts[0]
    own = {part for part, study in PARTS.items() if path.stem == study or folder == part}
    found = imports(path)
    roots = {name.partition(".")[0] for name in found}
    assert roots & {"paceline", KIT, *NAMES} or path.name == "__init__.py" or folder == KIT
    assert not roots & (NAMES - own)
    assert not [name for name in found if any(name == above or name.startswith(f"{above}.") for above in ABOVE)]


@pytest.mark.parametrize("name", [*PARTS, KIT])
def test_studies_import_paceline_before_torch(name: str) -> None:
    """It tells torch's threads not to spin, which they read when torch is loaded."""
    assert "paceline" in imports(STUDIES / name / "__init__.py")
