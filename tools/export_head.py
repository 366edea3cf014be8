"""Write an EAGLE head in the layout that another engine loads: vLLM, SGLang or the library speculators.

    .venv/bin/python tools/export_head.py vllm paceline-small-eagle build/eagle-vllm --tokens 3
    .venv/bin/python tools/export_head.py sglang folder/head build/eagle-sglang
    .venv/bin/python tools/export_head.py speculators folder/head build/eagle3 --verifier org/target

What such an engine cannot express is refused in words; nothing is written then. Sources: the loaders of these engines
(``llama_eagle`` and ``llama_eagle3`` of vLLM and SGLang, ``Eagle3SpeculatorConfig`` of speculators).
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from safetensors.torch import save_file
from torch import Tensor

from paceline.core.errors import CapabilityError, ConfigError
from paceline.core.options import shown
from paceline.draft.eagle.eagle3 import AUX, INNER, Eagle3Model
from paceline.draft.eagle.model import CONFIG_FILE, OWN, WEIGHTS_FILE, load_head, read_head, read_values
from paceline.draft.eagle.speculators import LAYER, TYPE, VARIANTS
from paceline.model.hot import FILE as HOT_FILE
from paceline.weights.files import is_file, read_json
from paceline.weights.source import resolve_folder

Engine = Literal["vllm", "sglang", "speculators"]
THIRD = "LlamaForCausalLMEagle3"
FIRST = {"vllm": "LlamaForCausalLM", "sglang": "LlamaForCausalLMEagle"}  # architecture of an EAGLE-1 or 2 head
OTHERS = {
    "lyanna.json": "a Lyanna head: other engines know no layer of its form, and no re-sampling",
    "medusa.json": "a Medusa head, which vLLM and SGLang no longer load",
    "streams.json": "a set of streams, which change the target's own pass",
    "spire.json": "a SPIRe draft, which reads the target's K/V",
}


def export(engine: Engine, head: Path, out: Path, verifier: str = "", tokens: int = 3) -> str:
    """Write a head as an engine loads it.

    Args:
        engine: whose layout.
        head: folder of a head of ours, or of a published one.
        out: a folder that is not there yet, or is empty.
        verifier: name or folder of the target, for speculators.
        tokens: that speculators' config has drafted a step.

    Returns:
        The command that serves it there.

    Raises:
        ConfigError: a folder without a head, one that is taken, or no name of the target.
        CapabilityError: the engine cannot express it.
    """
    subject = f"export {engine} {head}"
    if engine not in get_args(Engine):
        raise ConfigError(subject, f"no engine {shown(engine)}", f"name one of {', '.join(get_args(Engine))}")
    for file, what in OTHERS.items():
        if is_file(head / file):
            raise CapabilityError(subject, f"this is {what}", "export an EAGLE head")
    model = load_head(head)
    if is_file(head / HOT_FILE):
        wrong = f"its drafts are limited to hot tokens ({HOT_FILE}), and its head has no vocabulary of its own"
        raise CapabilityError(subject, wrong, f"copy the folder without {HOT_FILE}: it then drafts from all tokens")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(subject, f"{out} is there already", "name a folder that is not")
    facts_of_head = json.loads((head / CONFIG_FILE).read_text(encoding="utf-8"))  # facts that only Paceline reads
    values, config = read_values(head), read_head(head)[0] | ({OWN: facts_of_head[OWN]} if OWN in facts_of_head else {})
    if isinstance(model, Eagle3Model):
        facts = _verifier(subject, verifier, tokens) if engine == "speculators" else {}
        config, values = _third(engine, config, values, model, facts)
    else:
        config, values = _first(engine, subject, config, values)
    out.mkdir(parents=True, exist_ok=True)
    whole = {name: value.contiguous() for name, value in values.items()}
    save_file(whole, out / WEIGHTS_FILE, metadata={"format": "pt"})
    (out / CONFIG_FILE).write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    third = isinstance(model, Eagle3Model)
    if engine == "sglang":
        server = (
            f"python -m sglang.launch_server --model TARGET --speculative-algorithm {'EAGLE3' if third else 'EAGLE'}"
        )
        return f"{server} --speculative-draft-model-path {out}"
    method = {"method": "eagle3" if third else "eagle", "model": str(out), "num_speculative_tokens": tokens}
    return f"vllm serve TARGET --speculative-config '{json.dumps(method)}'"


def _first(
    engine: Engine, subject: str, config: dict[str, Any], values: dict[str, Tensor]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return a head of EAGLE-1 or 2."""
    bias = values.get("fc.bias")
    if engine == "speculators":
        wrong = "speculators has EAGLE-3 heads alone, this is one of EAGLE-2"
        raise CapabilityError(subject, wrong, "export it for vllm")
    if engine == "vllm" and bias is not None:
        if bool(bias.any()):
            raise CapabilityError(subject, "its fusing map has a bias, which vLLM leaves out", "export it for sglang")
        del values["fc.bias"]
    if engine == "sglang" and bias is None:  # SGLang's has one, random where the file has none
        values["fc.bias"] = torch.zeros_like(values["fc.weight"][:, 0])
    return {**config, "architectures": [FIRST[engine]]}, values


def _third(
    engine: Engine, config: dict[str, Any], values: dict[str, Tensor], model: Eagle3Model, verifier: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return a head of EAGLE-3, whose draft's tokens have both names that loaders look for."""
    layer = "layers.0." if engine == "speculators" else "midlayer."
    named = {n.replace("midlayer.", "layers.0.").replace("layers.0.", layer): v for n, v in values.items()}
    count = len(model.tokens)
    if not torch.equal(model.tokens, torch.arange(model.config.vocab_size)):
        named["d2t"] = model.tokens - torch.arange(count)
        named["t2d"] = torch.isin(torch.arange(model.config.vocab_size), model.tokens)
    else:
        named = {n: v for n, v in named.items() if n not in ("d2t", "t2d")}
    layer_config = {n: v for n, v in config.items() if n not in (AUX, INNER, OWN, "draft_vocab_size")}
    layer_config |= {"tie_word_embeddings": False}
    aux = None if model.aux is None else [*model.aux]
    if engine == "speculators":
        layer_config["architectures"] = ["LlamaForCausalLM"]
        flat = {"architectures": ["Eagle3Speculator"], TYPE: "eagle3", LAYER: layer_config, **verifier}
        return {**flat, "draft_vocab_size": count, AUX: aux, **dict.fromkeys(VARIANTS, False)}, named
    whole = {**layer_config, "architectures": [THIRD], "draft_vocab_size": count}
    if aux is not None:  # inputs of layers for vLLM; SGLang counts the outputs before them
        whole |= {AUX: aux, INNER: {AUX: [i - 1 for i in aux], "use_aux_hidden_state": True}}
    return whole, named


def _verifier(subject: str, name: str, tokens: int) -> dict[str, Any]:
    """Return the part of speculators' config that names the target."""
    if not name:
        raise ConfigError(subject, "its config names the target, and none is given", "add --verifier NAME")
    folder = Path(name)
    config = read_json(folder / "config.json", "restore it") if is_file(folder / "config.json") else {}
    architectures = config.get("architectures") or []
    method = {"proposal_type": "greedy", "speculative_tokens": tokens}
    return {
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [method],
            "verifier": {"name_or_path": name, "architectures": architectures},
        }
    }


def main() -> None:
    """Write the head, and print the command that serves it there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", choices=get_args(Engine))
    parser.add_argument("head", help="head of EAGLE, EAGLE-2 or EAGLE-3: folder or name")
    parser.add_argument("out", type=Path, help="where it is written; not there yet")
    parser.add_argument("--verifier", default="", help="name or folder of the target, which speculators' config has")
    parser.add_argument("--tokens", type=int, default=3, help="tokens drafted a step")
    asked = parser.parse_args()
    try:
        print(export(asked.engine, resolve_folder(asked.head), asked.out, asked.verifier, asked.tokens))
    except ConfigError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
