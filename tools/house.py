"""The size of `src/`: lines by package, functions, classes, C++ files; of a commit, or of the checkout.

python tools/house.py [COMMIT ..]
"""

from __future__ import annotations

import argparse
import ast
import io
import subprocess
import tarfile
from collections import Counter
from pathlib import PurePath
from statistics import median, quantiles

PACKAGE = "src/paceline"
Function = ast.FunctionDef | ast.AsyncFunctionDef


def sources(commit: str) -> dict[PurePath, str]:
    """The text of every Python and C++ file of a commit's package."""
    packed = subprocess.run(["git", "archive", commit, PACKAGE], check=True, capture_output=True).stdout
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        files = [file for file in archive if PurePath(file.name).suffix in (".py", ".cpp", ".h")]
        return {PurePath(file.name): archive.extractfile(file).read().decode() for file in files}  # type: ignore[union-attr]


def figures(files: dict[PurePath, str]) -> dict[str, str]:
    """What is to be said of a state, by name."""
    python = {path: text for path, text in files.items() if path.suffix == ".py"}
    compiled = {path: len(text.splitlines()) for path, text in files.items() if path.suffix != ".py"}
    lines = {path: len(text.splitlines()) for path, text in python.items()}
    nodes = [node for text in python.values() for node in ast.walk(ast.parse(text))]
    functions = [node for node in nodes if isinstance(node, Function)]
    lengths = [(node.end_lineno or 0) - node.lineno + 1 for node in functions]
    spread = median(lengths), quantiles(lengths, n=20)[-1], max(lengths)
    classes = Counter(node.name for node in nodes if isinstance(node, ast.ClassDef))
    packages = Counter[str]()
    for path, count in lines.items():
        packages[path.parts[2] if len(path.parts) > 3 else "single files"] += count
    return {
        "Python": f"{sum(lines.values()):,}",
        **{name: f"{count:,}" for name, count in sorted(packages.items())},
        "longest file": f"{max(lines.values()):,}",
        "C++": f"{sum(compiled.values()):,}",
        "longest C++ file": f"{max(compiled.values(), default=0):,}",
        "functions": f"{len(functions):,}",
        "lines of a function: median, 95%, longest": ", ".join(f"{n:.0f}" for n in spread),
        "functions with a docstring": f"{sum(bool(ast.get_docstring(f)) for f in functions) / len(functions):.1%}",
        "classes": f"{classes.total():,}",
        "class names that stand for several": f"{sum(count > 1 for count in classes.values())}",
    }


def main() -> None:
    """Print a table with a column for every commit."""
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("commits", nargs="*", default=["HEAD"])
    commits = ask.parse_args().commits
    found = [figures(sources(commit)) for commit in commits]
    print(f"| | {' | '.join(commits)} |\n|:--|{'--:|' * len(commits)}")
    for name in dict.fromkeys(name for column in found for name in column):
        print(f"| {name} | {' | '.join(column.get(name, '') for column in found)} |")


if __name__ == "__main__":
    main()
