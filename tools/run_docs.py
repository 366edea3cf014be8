"""Run the commands that README and the pages for readers show.

    python tools/run_docs.py [--all] [PAGE ...]

Commands run in a scratch folder with links to the checkout; `paceline serve` is ended once it is healthy. A comment
before a block changes that: ``<!-- run: 1 3 MODEL=paceline-small -->`` runs its first and third command with MODEL
replaced, and ``<!-- run: 0 -->`` none, since they take long or need other hosts. ``--all`` runs those, too.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

ROOT = Path(__file__).resolve().parents[1]
PAGES = ["README.md", "CONTRIBUTING.md", *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md")))]
PAGES += [str(path.relative_to(ROOT)) for path in sorted(ROOT.glob("src/paceline/papers/*/README.md"))]
BLOCK = re.compile(r"(?:<!-- run: ([^>]*) -->\n)?```(sh|python)\n(.*?)^```", re.DOTALL | re.MULTILINE)
LIMIT_S = 600


def commands(text: str, everything: bool) -> list[str | list[str]]:
    """Return a page's commands in order: a text of the shell, or the words of a Python program."""
    found: list[str | list[str]] = []
    program = ""
    for marks, language, block in BLOCK.findall(text):
        words = marks.split()
        numbers = [int(word) for word in words if word.isdigit()]
        if language == "python":
            if everything or 0 not in numbers:  # later blocks of a page use names of earlier ones
                program += block
            continue
        lines = [re.sub(r"\s+#\s.*", "", line) for line in block.replace("\\\n", " ").splitlines() if line.strip()]
        for number, line in enumerate(lines, 1):
            for name, _, value in (word.partition("=") for word in words if "=" in word):
                line = re.sub(rf"(?<![\w.-]){re.escape(name)}(?![\w.-])", value, line)
            if everything or not numbers or number in numbers:
                found.append(line)
    return [*found, *([["-c", program]] if program else [])]


def served(words: list[str], folder: Path, env: dict[str, str]) -> str:
    """Start a server on a free port, end it once it is healthy, and return what is wrong."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    end = time.monotonic() + LIMIT_S
    with subprocess.Popen([*words, "--port", port], cwd=folder, env=env) as process:
        while process.poll() is None and time.monotonic() < end:
            try:
                if urlopen(f"http://127.0.0.1:{port}/health").status == 200:
                    break
            except URLError:
                time.sleep(0.2)
        process.send_signal(signal.SIGTERM)
        return "" if process.wait(60) == 0 else f"exit status {process.returncode}"


def run(command: str | list[str], folder: Path, env: dict[str, str]) -> str:
    """Run a command and return what is wrong; empty: nothing."""
    if isinstance(command, str):
        command = command.replace(".venv/bin/", "")
        if command.startswith("paceline serve"):
            return served(shlex.split(command), folder, env)
    words = [sys.executable, *command] if isinstance(command, list) else ["bash", "-c", command]
    try:
        done = subprocess.run(words, cwd=folder, env=env, input=b"Hello\n", capture_output=True, timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        return f"not done after {LIMIT_S} s"
    return "" if done.returncode == 0 else f"exit status {done.returncode}: {done.stderr.decode()[-1500:]}"


def main() -> int:
    """Run the commands of some pages; return 1 where one fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="*", default=PAGES)
    parser.add_argument("--all", action="store_true", help="run what takes long or needs other hosts, too")
    chosen = parser.parse_args()
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    env = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT / "src")}
    failed = 0
    for page in chosen.pages:
        with tempfile.TemporaryDirectory() as scratch:
            for entry in ROOT.iterdir():
                if entry.name not in ("build", ".git"):
                    (Path(scratch) / entry.name).symlink_to(entry)
            for command in commands((ROOT / page).read_text("utf-8"), chosen.all):
                began = time.monotonic()
                wrong = run(command, Path(scratch), env)
                failed += bool(wrong)
                shown = command if isinstance(command, str) else "the Python of the page"
                print(f"{'FAILED' if wrong else 'ok':6} {time.monotonic() - began:5.0f} s  {page}: {shown}", flush=True)
                if wrong:
                    print(wrong, flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
