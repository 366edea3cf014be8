"""Count words and phrases that plain technical English does without, in `src/` and in the documentation.

    python tools/words.py [PATTERN]

With a pattern's name its places are listed. `tools/size.py` fails where a count is above its entry in size.toml.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PARTICIPLES = re.compile("found|made|given|known|said|told|kept|left|asked|wanted|taken|shown|own")
OLD_NAMES = re.compile(
    "speak|_heard|rode|choose_riders|Carriers|Said|Ask|Grown|Growing|GoingSessions|_torn|_untold|_mend|_anew|News|Look|Looked|"
    "Patience|Launched|Spare|back|fallen|fell|give|hop_here|taking|giving|Joins|PassesLost|Tell|_fallen|Flight|orphan|"
    "_name_strangers|witness|_furthest|hold|lender|LastWords|Making|renew|rested|ask_ms|forget|Place|Origin"
)
# Names that stay, by reason: "name", or "path: name" in src/paceline.
EXCEPTIONS = {
    "public: LLM.forget, Drafter.forget and what they call": {"forget"},
    "public: a field of Chunk": {"core/outputs.py: shown"},
    "a name in JSON: statistics and reports, saved heads, paceline plan --json": {
        *(f"{path}: rode" for path in ("bench/records.py", "core/stats.py", "papers/streaming/native.py")),
        "papers/streaming/reading.py: rode",
        "draft/medusa/heads.py: own",
        "plan/acceptance.py: own",
    },
    "left and right operands": {"bench/summary.py: left", "train/chunked.py: left"},
    "a function of 150 messages: a value as a message shows it": {"core/options.py: shown"},
}
KEPT = set().union(*EXCEPTIONS.values())
OPENINGS = re.compile(r"(What|Whether|Of|How|Where|Who|When|Which|See|As|That)\b")
PHRASES = {
    "speech for computation": re.compile(r"\b(says?|said|tells?|told|hears?|heard|asks?|asked)\b", re.IGNORECASE),
    "behind": re.compile(r"\bbehind\b", re.IGNORECASE),
    "negation by 'no'": re.compile(r"(?<!there )\b(is|are|was|were) no (?!longer)\w+", re.IGNORECASE),
    "relative clause as subject": re.compile(
        r"(?<![\w,] )\b[Ww]ho (?!is\b|are\b|may\b)\w+|(?:^|[.:;(] )[Ww]hat \w+s\b"
    ),
    "archaic words": re.compile(
        r"\b(anew|heeds?|trifle|lent|torn|rode|likewise|apart|beside|goes on|go on|in short|as far as|for ever)\b",
        re.IGNORECASE,
    ),
}
NAMES = ["participles as names", "old names", "noun clauses in docstrings", *PHRASES]
COMMENT = re.compile(r"(?:^|\s)#\s(.*)")
Place = tuple[str, int, str]  # pattern, line, text


def places(path: str, text: str) -> Iterator[Place]:
    """Yield what is found in a Python file or a page."""
    if not path.endswith(".py"):
        for number, line in enumerate(text.splitlines(), 1):
            yield from phrases(number, line)
        return
    for number, line in enumerate(text.splitlines(), 1):
        yield from phrases(number, "".join(COMMENT.findall(line)))
    for node in ast.walk(ast.parse(text)):
        names = []
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            for number, line in enumerate(node.value.splitlines(), node.lineno):
                yield from phrases(number, line)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names = [node.name]
            opening = (ast.get_docstring(node) or "").split("\n")[0]
            if OPENINGS.match(opening):
                yield "noun clauses in docstrings", node.lineno, opening
        elif isinstance(node, ast.arg):
            names = [node.arg]
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names = [node.id]
        for name in names:
            if {name, f"{path.removeprefix('src/paceline/')}: {name}"} & KEPT:
                continue
            if PARTICIPLES.fullmatch(name):
                yield "participles as names", node.lineno, name
            elif OLD_NAMES.fullmatch(name):
                yield "old names", node.lineno, name


def phrases(number: int, line: str) -> Iterator[Place]:
    """Yield the phrases of a line, without its identifiers: words in backticks, parameters before a colon, keys."""
    line = re.sub(r"`+[^`]*`+|^\s*\w+(, \w+)*: ", "", line)
    if " " not in line.strip():
        return
    for name, pattern in PHRASES.items():
        for match in pattern.finditer(line):
            yield name, number, f"{match[0]}: {line.strip()}"


def shelf_of(path: str) -> str | None:
    """Return whether a file is of the code or of the documentation; None: of neither."""
    if path.startswith("src/paceline/") and path.endswith(".py"):
        return "src"
    return "docs" if path.endswith(".md") and path.startswith(("docs/", "README", "CONTRIBUTING", "src/")) else None


def count(files: dict[str, str]) -> Counter[str]:
    """Count each pattern in files, given by their paths, as "pattern, shelf"."""
    counts = Counter[str]()
    for path, text in files.items():
        if shelf := shelf_of(path):
            counts.update(f"{name}, {shelf}" for name, *_ in places(path, text))
    return counts


def main() -> int:
    """Print the counts, or the places of a pattern."""
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    files = {name: (ROOT / name).read_text("utf-8") for name in listed if shelf_of(name)}
    if len(sys.argv) == 1:
        for name, number in sorted(count(files).items()):
            print(f"{number:6} {name}")
    elif sys.argv[1] not in NAMES:
        print(f"{sys.argv[1]!r} is not a pattern; name one of: {', '.join(NAMES)}", file=sys.stderr)
        return 2
    else:
        for path, text in files.items():
            for name, number, found in places(path, text):
                if name == sys.argv[1]:
                    print(f"{path}:{number}: {found}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
