"""Count the code, options and documentation of the project; fail where a part is larger than its entry in size.toml.

    python tools/size.py [COMMIT] [--write]

Code lines leave out blanks, comments and docstrings. A public name is a function, class or method of ``src/`` that does
not begin with an underscore. An option is a field of a config class. With a commit, that commit is counted and nothing
is checked; ``--write`` lowers the entries to what there is now, and raises none. ``tools/words.py`` defines the words
that are avoided.
"""

from __future__ import annotations

import argparse
import ast
import re
import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path

import words

ROOT = Path(__file__).resolve().parents[1]
LIMITS = ROOT / "size.toml"
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def code_lines(text: str, tree: ast.Module) -> int:
    """Return the lines that are neither blank nor a comment nor part of a docstring."""
    skipped: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, *DEFINITIONS)) and ast.get_docstring(node, clean=False) is not None:
            skipped.update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    lines = enumerate(text.splitlines(), start=1)
    return sum(1 for i, line in lines if line.strip() and not line.strip().startswith("#") and i not in skipped)


def count(files: dict[str, str]) -> dict[str, Counter[str]]:
    """Count files, given by their paths: by table of size.toml and by part of it."""
    sizes = {name: Counter[str]() for name in ("code", "names", "options", "native", "tests", "words")}
    for path, text in files.items():
        parts = path.split("/")
        if path.startswith("src/paceline/") and path.endswith(".py"):
            tree = ast.parse(text)
            part = parts[2] if len(parts) > 3 else "single files"
            sizes["code"][part] += code_lines(text, tree)
            nodes = [*ast.walk(tree)]
            sizes["names"][part] += sum(isinstance(n, DEFINITIONS) and not n.name.startswith("_") for n in nodes)
            sizes["options"][part] += sum(
                isinstance(n, ast.Call) and isinstance(n.func, ast.Name) and n.func.id == "option" for n in nodes
            )
        elif path.startswith("src/") and path.endswith((".h", ".cpp")):
            sizes["native"]["C++"] += sum(1 for line in text.splitlines() if line.strip()[:2] not in ("", "//"))
        elif path.startswith("tests/") and path.endswith(".py"):
            sizes["tests"][parts[1] if len(parts) > 2 else "single files"] += len(text.splitlines())
        elif path.endswith(".md") and (
            parts[0] in ("docs", "README.md", "CHANGELOG.md", "CONTRIBUTING.md") or "papers" in parts[:-1]
        ):
            shelf = "measured" if "measured" in parts else "decisions" if parts[-1] == "decisions.md" else "readers"
            sizes["words"][shelf] += len(re.sub(r"<!--.*?-->", "", text).split())
    sizes["avoided"] = words.count(files)
    return sizes


def read(commit: str | None) -> dict[str, str]:
    """Read the files that git tracks, as they are in the working tree or in a commit."""

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout

    listed = git("ls-tree", "-r", "--name-only", commit) if commit else git("ls-files")
    names = [name for name in listed.splitlines() if name.endswith((".py", ".md", ".h", ".cpp"))]
    if commit:
        return {name: git("show", f"{commit}:{name}") for name in names}
    return {name: (ROOT / name).read_text("utf-8") for name in names if (ROOT / name).is_file()}


def main() -> int:
    """Print the counts; return 1 where a part is larger than its entry."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit", nargs="?", help="count this commit, and check nothing")
    parser.add_argument("--write", action="store_true", help="lower the entries to what there is now")
    chosen = parser.parse_args()
    sizes, limits = count(read(chosen.commit)), tomllib.loads(LIMITS.read_text("utf-8"))
    too_large = []
    for table, parts in sizes.items():
        listed = ", ".join(f"{part} {n:,}" for part, n in parts.most_common() if n)
        print(f"{table}: {sum(parts.values()):,} ({listed})")
        for part, n in parts.items():
            if n > (limit := limits.get(table, {}).get(part, 0)):
                too_large.append(f"{table} of {part!r}: {n:,}, and size.toml allows {limit:,}")
    if chosen.write:
        body = []
        for table, parts in sizes.items():
            kept = {part: min(n, limits.get(table, {}).get(part, n)) for part, n in sorted(parts.items()) if n}
            body.append(f"[{table}]\n" + "".join(f'"{part}" = {n}\n' for part, n in kept.items()))
        head = "".join(f"{line}\n" for line in LIMITS.read_text("utf-8").splitlines() if line.startswith("#"))
        LIMITS.write_text(head + "\n" + "\n".join(body), "utf-8")
    elif too_large and not chosen.commit:
        print("\n".join(["too large:", *too_large, "remove something, or raise the entry and say which user needs it"]))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
