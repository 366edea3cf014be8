"""The tools that make weights of weights (means, stopped runs as models, deeper sets), and the one that keeps answers
as ids."""

from __future__ import annotations

import hashlib
import io
import json
import runpy
import subprocess
import sys
import traceback
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
import torch
from kits.stream_sets import MODEL
from safetensors.torch import load_file, save_file
from toolkit import run_until, trainer, write_data, write_target
from train_target import TargetRecipe

from paceline.train.answers import AnswerConfig, choose, making, write
from paceline.train.data import Encoder, SourceSpec
from paceline.train.network import Network
from paceline.weights.source import load_tokenizer, resolve_folder

TOOLS = Path(__file__).parents[2] / "tools"


def model(folder: Path, value: float, rows: int = 2) -> Path:
    folder.mkdir()
    save_file({"w": torch.full((rows, 3), value, dtype=torch.bfloat16)}, folder / "model.safetensors")
    (folder / "config.json").write_text(f'"{folder.name}"')
    return folder


def run(*arguments: object, tool: str = "average_weights") -> subprocess.CompletedProcess[str]:
    """What the tool says, run as a program, but in this process, which has torch loaded."""
    said, complained, status = io.StringIO(), io.StringIO(), 0
    command = [str(TOOLS / f"{tool}.py"), *map(str, arguments)]
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(said), redirect_stderr(complained):
        patch.setattr(sys, "argv", command)
        try:
            runpy.run_path(command[0], run_name="__main__")
        except SystemExit as end:
            if end.code:
                status = 1
                print(end.code, file=complained)
        except Exception:  # what the interpreter says of a program that ends with it
            status = 1
            traceback.print_exc(file=complained)
    return subprocess.CompletedProcess(command, status, said.getvalue(), complained.getvalue())


def test_a_stopped_run_becomes_a_model(tmp_path: Path) -> None:
    init, folder, out = tmp_path / "init", tmp_path / "run", tmp_path / "out"
    init.mkdir()
    write_target(init, write_data(tmp_path))
    job = trainer(folder, TargetRecipe(network := Network.load(init), {}))
    run_until(job, 2)
    assert not job.finished
    done = run(folder, "--init", init, "--out", out, tool="export_checkpoint")
    assert (done.returncode, done.stderr) == (0, "")
    assert ": 2 steps" in done.stdout
    stored, before = load_file(out / "model.safetensors"), load_file(init / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj.weight"
    assert stored.keys() == before.keys()
    assert not torch.equal(stored[name].float(), before[name].to(torch.bfloat16).float())
    told = dict(Network.load(out).named_parameters())
    for key, value in network.named_parameters():
        assert torch.equal(told[key].float(), value.detach().to(torch.bfloat16).float())
    assert (out / "tokenizer.json").read_bytes() == (init / "tokenizer.json").read_bytes()


def test_answers_come_back_from_their_ids(tmp_path: Path) -> None:
    folder = resolve_folder(MODEL)
    data = tmp_path / "data"
    data.mkdir()
    (data / "some.jsonl").write_text("".join(f'{{"prompt": "say {n}", "completion": "{n}"}}\n' for n in range(9)))
    encoder, config = (Encoder(load_tokenizer(folder), 64), AnswerConfig(limit=5, piece=64, temperature=0.7))
    said = iter([[7], [5, 6, 300], [], [9] * 40, [1, 2]])
    file = tmp_path / "answers" / "some.jsonl"
    file.parent.mkdir()
    source = SourceSpec(file=str(data / "some.jsonl"))
    prompts, facts = choose(source, encoder, config), making(source, config, "it")
    write(file, prompts, facts, encoder.tokenizer, lambda ids, _: [next(said) for _ in ids])
    assert run("pack", file, "--out", tmp_path / "kept", tool="answer_ids").returncode == 0
    listed = json.loads((tmp_path / "kept" / "manifest.json").read_text("utf-8"))
    [packed] = [*(tmp_path / "kept").glob("*.xz")]
    [row] = listed["files"].values()
    lengths = [len(json.loads(line)["completion_tokens"]) for line in file.read_text("utf-8").splitlines()]
    assert (listed["answers"], listed["tokens"]) == (row["answers"], row["tokens"]) == (len(lengths), sum(lengths))
    assert row["sha256"] == hashlib.sha256(packed.read_bytes()).hexdigest()
    ids = tmp_path / "kept" / "some.ids.xz"
    unpack = ("unpack", ids, "--target", MODEL, "--data", data, "--out", tmp_path / "again")
    assert run(*unpack, tool="answer_ids").stderr == ""
    for name in ("some.jsonl", "some.jsonl.json"):
        assert (tmp_path / "again" / name).read_bytes() == (file.parent / name).read_bytes()
    (data / "some.jsonl").write_text('{"prompt": "say 1", "completion": "1"}\n')
    assert "give the same data" in run(*unpack, tool="answer_ids").stderr
