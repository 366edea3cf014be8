"""The wheel: installed without a compiler it answers and serves with the kernels that it carries."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from kits.native import needs_kernels
from kits.server import free_port

from paceline import kernels

ROOT = Path(__file__).resolve().parents[2]
DRAFTERS = [("none", "auto"), ("suffix", 8), ("draft_model:paceline-small-draft", 8), ("eagle", 8)]
SMOKE = f"""
import json, subprocess, sys, time
from pathlib import Path
from urllib.error import URLError
from urllib.request import Request, urlopen
from paceline import LLM, SamplingParams, kernels

library = kernels.library().path
assert Path(library).parent == kernels.SHIPPED and sys.prefix in library, library
work = ["def read_lines(path):\\n"], SamplingParams(temperature=0, max_tokens=24)
answers = [LLM("paceline-small", drafter=d, budget=b).generate(*work)[0] for d, b in {DRAFTERS}]
assert len({{tuple(answer.outputs[0].token_ids) for answer in answers}}) == 1
assert all(answer.stats.accepted > 0 for answer in answers[1:])
url = f"http://127.0.0.1:{{sys.argv[1]}}"
with subprocess.Popen([sys.executable, "-m", "paceline", "serve", "paceline-small", "--port", sys.argv[1]]) as server:
    while True:
        try:
            if urlopen(f"{{url}}/health").status == 200:
                break
        except URLError:
            assert server.poll() is None
            time.sleep(0.1)
    body = {{"model": "paceline-small", "prompt": "def read_lines(path):\\n", "max_tokens": 24, "temperature": 0}}
    headers = {{"Content-Type": "application/json"}}
    reply = json.load(urlopen(Request(f"{{url}}/v1/completions", json.dumps(body).encode(), headers)))
    assert reply["choices"][0]["text"] == answers[0].outputs[0].text, reply
    server.terminate()
print(kernels.describe())
"""


@pytest.mark.full
@pytest.mark.timeout(1200)
@needs_kernels
def test_an_installed_wheel_needs_no_compiler(tmp_path: Path) -> None:
    """Its level of instructions is the best of those built that the processor has."""

    def run(*command: object, **environment: str) -> str:
        env = {**os.environ, "PYTHONPATH": "", **environment}
        words = list(map(str, command))
        return subprocess.run(words, env=env, cwd=tmp_path, stdout=subprocess.PIPE, text=True, check=True).stdout

    level, python = kernels.describe(), tmp_path / "env" / "bin" / "python"
    run(sys.executable, "-m", "build", "--wheel", ROOT, "-o", tmp_path, PACELINE_LEVELS=f"baseline {level}")
    run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "env")
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(tmp_path / "env")}))
    (packages / "tests.pth").write_text(sysconfig.get_path("purelib"))  # torch and the rest
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", *tmp_path.glob("*.whl"))
    without = {"PATH": str(python.parent), "CXX": "", "XDG_CACHE_HOME": str(tmp_path / "cache"), kernels.SWITCH: ""}
    assert run(python, "-c", SMOKE, free_port(), **without).split()[-1] == level
    assert "\n" in run(python.with_name("paceline"), "generate", "-p", "def read_lines(path):", **without)
    assert not list((tmp_path / "cache").glob("paceline/kernels/*"))
