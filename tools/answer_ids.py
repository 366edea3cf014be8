"""A target's answers as token ids alone, small enough to keep: packs files of `answer_prompts.py`, and unpacks them.

    .venv/bin/python tools/answer_ids.py pack ANSWERS/*.jsonl --out FOLDER
    .venv/bin/python tools/answer_ids.py unpack FOLDER/*.ids.xz --target MODEL --data DATA --out ANSWERS
    .venv/bin/python tools/answer_ids.py circles ANSWERS/*.jsonl  # how much of the answers repeats itself

With `--held-out N NAME..` the last N answers of these files are in files of their own, `held-NAME.jsonl`, for
evaluations.
What is kept is what made the file and the ids that the target said, a hundredth of the bytes. Prompts and texts come
from the same data and the target's tokenizer; `tools/answer_prompts.py` then goes on with the unpacked file.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import lzma
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from answer_prompts import AnswerConfig, choose, making, sidecar

from paceline.adapt.answering import answer_line
from paceline.core.errors import ConfigError
from paceline.train.data import Encoder, SourceSpec
from paceline.weights.source import load_tokenizer, resolve_folder

SUFFIX = ".ids.xz"
MANIFEST = "manifest.json"
PLACES = (0, 64, 128, 256)  # of tokens in an answer


def pack(file: Path, out: Path) -> Path:
    """Keep a file's whole lines: its sidecar in one line, the answers' lengths, their ids."""
    made = json.loads(sidecar(file).read_text("utf-8"))
    lines = [line for line in file.read_text("utf-8").splitlines(keepends=True) if line.endswith("\n")]
    said = [json.loads(line)["completion_tokens"] for line in lines]
    parts = [np.array([len(ids) for ids in said], "<u4"), np.array([i for ids in said for i in ids], "<u4")]
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"{file.stem}{SUFFIX}"
    head = json.dumps({**made, "answers": len(said)}) + "\n"
    path.write_bytes(lzma.compress(head.encode() + b"".join(part.tobytes() for part in parts), preset=9))
    return path


def write_manifest(folder: Path) -> None:
    """List the packed files of a folder: what made each, its answers, their tokens and its SHA-256."""
    rows: dict[str, Any] = {}
    for file in sorted(folder.glob(f"*{SUFFIX}")):
        head, _, body = lzma.decompress(file.read_bytes()).partition(b"\n")
        made = json.loads(head)
        tokens = int(np.frombuffer(body[: 4 * made["answers"]], "<u4").sum())
        sha256 = hashlib.sha256(file.read_bytes()).hexdigest()
        rows[file.name] = {**made, "tokens": tokens, "sha256": sha256}
    total = {name: sum(row[name] for row in rows.values()) for name in ("answers", "tokens")}
    (folder / MANIFEST).write_text(json.dumps({**total, "files": rows}, indent=1) + "\n", encoding="utf-8")


def unpack(file: Path, target: str, data: Path, out: Path) -> Path:
    """Write the file of answers again, with its sidecar.

    Raises:
        ConfigError: other data, or a tokenizer with which the data have fewer prompts.
    """
    head, _, body = lzma.decompress(file.read_bytes()).partition(b"\n")
    made: dict[str, Any] = json.loads(head)
    made.pop("text_prompt", None)  # of older files
    count, source = made.pop("answers"), SourceSpec(file=str(data / made["source"]))
    config = AnswerConfig(**{name: made[name] for name in ("piece", "seed", "temperature")})
    if making(source, config, made["target"]) != made:
        raise ConfigError(f"answers {file}", f"{source.file} is not the file that was asked", "give the same data")
    encoder = Encoder(load_tokenizer(resolve_folder(target, offline=True)), config.piece)
    prompts = choose(source, encoder, config)
    if len(prompts) < count:
        raise ConfigError(
            f"answers {file}", f"only {len(prompts)} of {count} prompts are there", "give their own target"
        )
    lengths, ids = np.frombuffer(body[: 4 * count], "<u4"), iter(np.frombuffer(body[4 * count :], "<u4").tolist())
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"{file.name.removesuffix(SUFFIX)}.jsonl"
    answers = [list(islice(ids, length)) for length in lengths.tolist()]
    lines = [answer_line(encoder.tokenizer, prompt, said) for prompt, said in zip(prompts, answers, strict=False)]
    path.write_text("".join(lines), "utf-8")
    sidecar(path).write_text(json.dumps(made, indent=1) + "\n", "utf-8")
    return path


def hold_out(path: Path, count: int) -> Path:
    """Move the last answers of a file into one of their own, which no run trains on."""
    lines = path.read_text("utf-8").splitlines(keepends=True)
    held = path.with_name(f"held-{path.name}")
    held.write_text("".join(lines[-count:]), "utf-8")
    path.write_text("".join(lines[:-count]), "utf-8")
    return held


def circles(file: Path) -> str:
    """The share of an answer's tokens that end four which stood together before in it, by their place."""
    counts = {place: [0, 0] for place in PLACES}
    for line in file.open(encoding="utf-8"):
        said, seen = json.loads(line)["completion_tokens"], set()
        for i in range(3, len(said)):
            four, place = tuple(said[i - 3 : i + 1]), max(p for p in PLACES if p <= i)
            counts[place][0] += four in seen
            counts[place][1] += 1
            seen.add(four)
    return f"{file.name}: " + ", ".join(f"from {p} on {a / b:.0%}" for p, (a, b) in counts.items() if b)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("pack", "unpack", "circles"))
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, help="folder for what is made")
    parser.add_argument("--target", help="unpack: the model that answered")
    parser.add_argument("--data", type=Path, help="unpack: the folder of the files that it was asked")
    parser.add_argument(
        "--held-out", nargs="+", default=["0"], metavar=("N", "NAME"), help="unpack: answers kept apart"
    )
    given = parser.parse_args()
    count, *held = given.held_out
    if given.what == "unpack" and not (given.target and given.data):
        parser.error("unpack wants --target and --data")
    if given.what == "circles":
        print(*map(circles, given.files), sep="\n")
        return
    if given.out is None:
        parser.error(f"{given.what} wants --out")
    for file in given.files:
        made = pack(file, given.out) if given.what == "pack" else unpack(file, given.target, given.data, given.out)
        print(made)
        if made.stem in held:
            print(hold_out(made, int(count)))
    if given.what == "pack":
        write_manifest(given.out)


if __name__ == "__main__":
    main()
