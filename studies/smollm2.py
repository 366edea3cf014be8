"""SmolLM2 as the target: its ids beside transformers', a bench report by Spec-Bench's six categories, long prompts.

python studies/smollm2.py ids                                 # 200 prompts, 64 tokens each, in float32
paceline bench --model smollm2-135m --workload spec_bench --repeats 1 --out DIR ...
python studies/smollm2.py categories DIR/report.json
python studies/smollm2.py documents --data DATA --tokens 7800 --out FILE     # a workload for `paceline bench`
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import statistics
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from paceline import LLM, SamplingParams
from paceline.bench.workloads import load
from paceline.weights.source import load_tokenizer, resolve_folder

WORKLOADS = ("spec_bench", "gsm8k", "humaneval", "mmlu", "wikisql")  # chat prompts that come along, 40 of each
CATEGORIES = {"translation": "translation", "summarization": "summarization", "qa": "question answering"}
CATEGORIES |= {"math_reasoning": "mathematical reasoning", "rag": "retrieval"}
CHAT = "multi-turn conversation"  # MT-bench's eight
TOKENS = 64
DOCUMENTS = {"text_specpipe_books.txt.gz": "Summarize", "text_world_factbook.txt.gz": "Summarize, country by country,"}


def chat_prompts(llm: LLM, count: int) -> list[list[int]]:
    """Ids of the first turns, as many of each workload."""
    found = []
    for name in WORKLOADS:
        for prompt in load(name, limit=-(-count // len(WORKLOADS))).prompts:
            messages = [{"role": "user", "content": prompt.turns[0]}]
            text = llm.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
            found.append(llm.tokenizer.encode(text, add_special_tokens=False))
    return found[:count]


def reference(place: Path) -> Any:
    """Transformers' model of the same weights, in float32."""
    from transformers import AutoModelForCausalLM

    folder, file = (place.parent, {"gguf_file": place.name}) if place.is_file() else (place, {})
    made = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32, attn_implementation="eager", **file)
    return made.eval()


@torch.inference_mode()
def differences(model: Any, prompt: list[int], said: list[int]) -> Iterator[tuple[int, float]]:
    """Places of an answer where transformers' likeliest token, behind the same text, is another; and by how much its
    logit is above that of what was said."""
    logits = model(torch.tensor([prompt + said[:-1]])).logits[0, len(prompt) - 1 :]
    for place, (row, token) in enumerate(zip(logits, said, strict=True)):
        if int(row.argmax()) != token:
            yield place, float(row.max() - row[token])


def ids(model: str, count: int) -> None:
    """Greedy answers in float32, each token held against transformers' choice behind the same text."""
    llm = LLM(model, dtype="float32", threads=2, max_model_len=2048)
    prompts = chat_prompts(llm, count)
    params = SamplingParams(temperature=0, max_tokens=TOKENS)
    answers = [o.outputs[0].token_ids for o in llm.generate([{"prompt_token_ids": p} for p in prompts], params)]
    known, tokens, gaps = reference(resolve_folder(model)), 0, []
    for prompt, said in zip(prompts, answers, strict=True):
        tokens += len(said)
        first = next(differences(known, prompt, said), None)
        if first is not None:
            gaps.append(first[1])
    print(f"{model}, float32: {len(prompts)} answers, {tokens} tokens; {len(gaps)} answers differ from transformers'")
    for gap in gaps:
        print(f"  first difference: transformers' two likeliest tokens are {gap:.2e} apart")


def categories(report: Path) -> None:
    """Speed-up over plain decoding of every method by category: geometric means over prompts, all turns together."""
    found = json.loads(report.read_text("utf-8"))
    named = {prompt.id: prompt.category for prompt in load("spec_bench").prompts}
    rates: dict[tuple[str, str], list[float]] = defaultdict(list)
    for trial in found["trials"]:
        if trial["cell"]["workload"] == "spec_bench" and len(trial["prompts"]) == 1:
            tokens = sum(len(output) for output in trial["outputs"])
            rates[trial["method"], trial["prompts"][0].partition("/")[0]].append(tokens / trial["wall_ms"])
    methods = [method["name"] for method in found["methods"] if method["name"] != "plain"]
    by_category: dict[str, list[str]] = defaultdict(list)
    for prompt in dict.fromkeys(prompt for _, prompt in rates):
        by_category[CATEGORIES.get(named[prompt], CHAT)].append(prompt)
    print("| category | prompts | " + " | ".join(methods) + " |\n|---|--:|" + "--:|" * len(methods))
    for category, prompts in by_category.items():
        cells = []
        for method in methods:
            logs = [
                math.log(statistics.median(rates[method, p]) / statistics.median(rates["plain", p])) for p in prompts
            ]
            cells.append(f"{math.exp(statistics.mean(logs)):.2f}")
        print(f"| {category} | {len(prompts)} | " + " | ".join(cells) + " |")


def documents(data: Path, tokens: int, count: int, out: Path) -> None:
    """Write a workload of chats about parts of books and reports, each ``tokens`` long in the model's ids."""
    tokenizer = load_tokenizer(resolve_folder("smollm2-135m"))
    lines = []
    for file, asked in DOCUMENTS.items():
        text, step = gzip.decompress((data / file).read_bytes()).decode(), 6 * tokens  # characters: more than enough
        for place in range(count):
            ids = tokenizer.encode(text[step * (2 * place + 1) : step * (2 * place + 2)], add_special_tokens=False)
            part = tokenizer.decode(ids[:tokens])
            lines.append(
                json.dumps({"prompt": f"{asked} the following text.\n\n{part}", "category": file.split(".")[0]})
            )
    out.write_text("\n".join(lines) + "\n", "utf-8")
    print(f"{len(lines)} prompts of {tokens} tokens in {out}")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(dest="part", required=True)
    of_ids = parts.add_parser("ids")
    of_ids.add_argument("--model", default="smollm2-135m")
    of_ids.add_argument("--prompts", type=int, default=200)
    parts.add_parser("categories").add_argument("report", type=Path)
    of_documents = parts.add_parser("documents")
    of_documents.add_argument("--data", type=Path, required=True, help="folder of the texts")
    of_documents.add_argument("--tokens", type=int, default=7800)
    of_documents.add_argument("--count", type=int, default=2, help="prompts of each text")
    of_documents.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()
    if asked.part == "ids":
        ids(asked.model, asked.prompts)
    elif asked.part == "documents":
        documents(asked.data, asked.tokens, asked.count, asked.out)
    else:
        categories(asked.report)


if __name__ == "__main__":
    main()
