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
from toolkit import CONTEXT, run_until, trainer, write_data, write_target
from train_target import TargetRecipe

from paceline import LLM, SamplingParams
from paceline.adapt.answering import write
from paceline.train.data import Encoder, SourceSpec, load_source
from paceline.train.network import Network
from paceline.weights.source import load_tokenizer, resolve_folder

TOOLS = Path(__file__).parents[2] / "tools"
sys.path.insert(0, str(TOOLS))
from answer_prompts import AnswerConfig, choose, making, note_making, sidecar  # noqa: E402


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
    note_making(file, facts)
    write(file, prompts, encoder.tokenizer, lambda ids, _: [next(said) for _ in ids], 0, 512)
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


def test_answers_are_the_targets_own(tmp_path: Path) -> None:
    """Greedy, whole, gone on with by a higher limit; what trains on them reads the very ids."""
    data = write_data(tmp_path)
    target = write_target(tmp_path / "target", data)
    out = tmp_path / "deep" / "answers.jsonl"
    args = ("--target", target, "--data", data, "--out", out, "--length", "40", "--batch", "2")
    first = run(*args, "--limit", "5", tool="answer_prompts")
    assert first.returncode == 0 and "5 answers in" in first.stdout, first.stderr
    five = out.read_bytes()
    out.write_bytes(five + b'{"prompt": "half a li')  # as a killed process leaves it
    assert run(*args, "--limit", "9", tool="answer_prompts").returncode == 0
    assert out.read_bytes().startswith(five)
    made = [json.loads(line) for line in out.read_text("utf-8").splitlines()]
    assert len(made) == 9
    params = SamplingParams(max_tokens=40 - len(made[6]["prompt_tokens"]), temperature=0)
    wanted = LLM(str(target)).generate([{"prompt_token_ids": made[6]["prompt_tokens"]}], params)[0].outputs[0].token_ids
    assert made[6]["completion_tokens"] == list(wanted)
    read = load_source(SourceSpec(file=str(out)), Encoder(load_tokenizer(target), CONTEXT))
    assert [e.tokens.tolist() for e in read] == [r["prompt_tokens"] + r["completion_tokens"] for r in made]
    facts = json.loads(sidecar(out).read_text("utf-8"))
    assert (facts["source"], facts["temperature"], facts["piece"], facts["seed"]) == ("boxes.jsonl", 0.0, 40, 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--temperature", "0.5"], "their temperature is 0.0, this command's 0.5"),
        (["--target", "other"], "their target is"),
        (["--data", "other"], "their source is 'boxes.jsonl', this command's 'story.txt'"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_answers_of_another_making_are_not_gone_on_with(change: list[str], message: str, tmp_path: Path) -> None:
    data = write_data(tmp_path)
    target, out = write_target(tmp_path / "target", data), tmp_path / "a.jsonl"
    other = {"--target": target, "--data": data, "--out": out, "--length": "40", "--limit": "2"}
    first = [str(word) for pair in other.items() for word in pair]
    assert run(*first, tool="answer_prompts").returncode == 0
    kept = out.read_bytes()
    if change[0] == "--target":
        change = ["--target", str(write_target(tmp_path / "other", data, seed=5))]
    if change[0] == "--data":
        change = ["--data", str(data.parent / "story.txt")]
    done = run(*first, *change, tool="answer_prompts")
    assert done.returncode == 1 and message in done.stderr
    assert out.read_bytes() == kept
    sidecar(out).unlink()
    done = run(*first, *change, tool="answer_prompts")
    assert done.returncode == 1 and "which has their settings, cannot be read" in done.stderr
    assert out.read_bytes() == kept
