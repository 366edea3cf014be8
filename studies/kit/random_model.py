"""A random Llama of a given shape, to measure with; `paceline bench step --model OUT` times its passes.

python studies/kit/random_model.py random:12x768x2048x8192 OUT
"""

from __future__ import annotations

import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from paceline.core.errors import ConfigError
from paceline.weights.source import resolve_folder

RANDOM = "random:"
SHAPE = re.compile(r"random:(\d+)x(\d+)x(\d+)x(\d+)(?:x(\d+)x(\d+))?")
HEAD_DIM = 64


@contextmanager
def materialised(model: str) -> Iterator[str]:
    """Yield a model's name, or the folder of a random Llama ``random:LAYERSxWIDTHxFFxVOCAB[xHEADSxKVHEADS]``.

    By default the random one has heads of 64, a tied head and bf16 weights, made from a fixed seed; its folder is
    removed afterwards.

    Raises:
        ConfigError: a shape that cannot be.
    """
    if not model.startswith(RANDOM):
        yield model
        return
    with tempfile.TemporaryDirectory(prefix="paceline-") as folder:
        make(model, folder)
        yield folder


def make(model: str, folder: str) -> None:
    """Write the random model, and the embedded model's tokenizer where its tokens are among the vocabulary.

    Raises:
        ConfigError: a shape that cannot be.
    """
    sizes = _sizes(model)
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()  # a benchmark's progress is enough
    more: Any = {"tie_word_embeddings": True, "bos_token_id": 0, "eos_token_id": 1, "dtype": "bfloat16"}
    config = LlamaConfig(max_position_embeddings=4096, **sizes, **more)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        LlamaForCausalLM(config).bfloat16().save_pretrained(folder)
    if sizes["vocab_size"] >= 8192:
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(resolve_folder("paceline-small") / name, Path(folder, name))


def _sizes(model: str) -> dict[str, Any]:
    """Return the sizes of a random model's configuration."""
    match = SHAPE.fullmatch(model)
    layers, width, ff, vocab, heads, kv_heads = (int(part or -1) for part in match.groups()) if match else [0] * 6
    if heads < 0 and width % HEAD_DIM == 0:
        heads = kv_heads = width // HEAD_DIM
    if min(layers, width, ff, vocab, heads, kv_heads) < 1 or width % (2 * heads) or heads % kv_heads:
        remedy = "write random:12x768x2048x8192 (layers, width, feed-forward width, vocabulary; the width a multiple "
        remedy += "of 64) or random:5x64x172x512x8x4 (with heads and K/V heads)"
        raise ConfigError(f"model {model!r}", "it is not the shape of a random model", remedy)
    named = {"vocab_size": vocab, "hidden_size": width, "intermediate_size": ff, "num_hidden_layers": layers}
    return {**named, "num_attention_heads": heads, "num_key_value_heads": kv_heads}


if __name__ == "__main__":
    make(*sys.argv[1:])
