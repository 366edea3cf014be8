"""Random tiny checkpoints of every family, in Hugging Face format, made by transformers.

Every length that a wrong position or mask could hide behind (window, original context, scaling factor)
is shorter than the prompts of the tests, and weights are scaled so that greedy output keeps varying.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

CONTEXT = 512  # positions of every checkpoint
VOCAB = 200

_SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 1000.0,
    "short_factor": [1.0 + 0.1 * i for i in range(6)],
    "long_factor": [2.0 + 0.5 * i for i in range(6)],
    "partial_rotary_factor": 0.75,
}


def _rope(theta: float, **options: Any) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": theta, **options}


def _llama(**options: Any) -> Callable[[int], PreTrainedModel]:
    def make(vocab_size: int) -> PreTrainedModel:
        values = {**_SHAPE, "rope_parameters": _rope(100.0), **options}
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=vocab_size, **values))

    return make


def _mistral(vocab_size: int) -> PreTrainedModel:
    values = {**_SHAPE, "rope_parameters": _rope(1000.0), "sliding_window": 24, "head_dim": 32}
    return transformers.MistralForCausalLM(transformers.MistralConfig(vocab_size=vocab_size, **values))


def _qwen2(vocab_size: int) -> PreTrainedModel:
    window = {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}
    config = transformers.Qwen2Config(vocab_size=vocab_size, **_SHAPE, **window, rope_parameters=_rope(100.0))
    return transformers.Qwen2ForCausalLM(config)


def _qwen3(vocab_size: int) -> PreTrainedModel:
    yarn = _rope(100.0, factor=4.0, original_max_position_embeddings=48) | {"rope_type": "yarn"}
    config = transformers.Qwen3Config(
        vocab_size=vocab_size, **_SHAPE, head_dim=24, rope_parameters=yarn, tie_word_embeddings=True
    )
    return transformers.Qwen3ForCausalLM(config)


def _phi3(rope: dict[str, Any], original: int = CONTEXT) -> Callable[[int], PreTrainedModel]:
    def make(vocab_size: int) -> PreTrainedModel:
        values = {**_SHAPE, "sliding_window": 40, "pad_token_id": 0, "original_max_position_embeddings": original}
        config = transformers.Phi3Config(vocab_size=vocab_size, **values, rope_parameters=dict(rope))
        return transformers.Phi3ForCausalLM(config)

    return make


def _gemma3(factor: float = 1.0, **options: Any) -> Callable[[int], PreTrainedModel]:
    """Windows of 20 and a base of their own in all layers but every third, where larger models have a ``factor``."""

    def make(vocab_size: int) -> PreTrainedModel:
        ropes = {
            "full_attention": _rope(1000.0) if factor == 1 else _rope(1000.0, factor=factor) | {"rope_type": "linear"},
            "sliding_attention": _rope(50.0),
        }
        kinds = ["full_attention" if i % 3 == 2 else "sliding_attention" for i in range(4)]
        values = {**_SHAPE, "num_hidden_layers": 4, "head_dim": 32, "query_pre_attn_scalar": 24, "sliding_window": 20}
        values |= {"layer_types": kinds, "rope_parameters": ropes, **options}
        return transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(vocab_size=vocab_size, **values))

    return make


def _smollm3(vocab_size: int) -> PreTrainedModel:
    values = {**_SHAPE, "num_hidden_layers": 4, "no_rope_layer_interval": 2, "pad_token_id": 0, "bos_token_id": 1}
    config = transformers.SmolLM3Config(vocab_size=vocab_size, **values, rope_parameters=_rope(100.0))
    return transformers.SmolLM3ForCausalLM(config)


MAKERS: dict[str, Callable[[int], PreTrainedModel]] = {
    "llama2": _llama(),
    "llama3": _llama(rope_parameters=LLAMA3_ROPE, tie_word_embeddings=True),
    "vicuna": _llama(num_key_value_heads=4, rope_parameters=_rope(100.0, factor=3.0) | {"rope_type": "linear"}),
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "gemma3": _gemma3(),
    "smollm3": _smollm3,
    "phi3": _phi3(_rope(100.0, partial_rotary_factor=0.75)),
    # Within its original context; beyond it LongRoPE is refused.
    "phi3-longrope": _phi3(LONG_ROPE, original=400),
    "gemma3-scaled": _gemma3(factor=8.0, num_attention_heads=8, num_key_value_heads=1),
    "llama-biased": _llama(attention_bias=True, mlp_bias=True),
}


def build(
    family: str,
    folder: Path,
    seed: int = 0,
    *,
    vocab_size: int = VOCAB,
    tokenizer: Any = None,
    max_shard_size: str = "1GB",
) -> PreTrainedModel:
    """Make a random checkpoint of ``family`` in ``folder`` and return the transformers model, float32.

    Args:
        family: a key of `MAKERS`.
        folder: where config, weights and, if given, ``tokenizer`` are saved.
        seed: of the weights.
        vocab_size: tokens.
        max_shard_size: smaller than the weights for a sharded checkpoint.
    """
    torch.manual_seed(seed)
    model = MAKERS[family](vocab_size).eval()
    _randomise(model)
    model.generation_config.eos_token_id = None  # so that every answer has its full length
    model.config.eos_token_id = None
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    return model


def _randomise(model: PreTrainedModel) -> None:
    """Norms and biases get values of their own too: left at 1 and 0, a swapped pair would not show."""
    gemma = model.config.model_type == "gemma3_text"
    with torch.no_grad():
        for name, value in model.named_parameters():
            if "norm" in name and name.endswith("weight"):
                value.uniform_(0.5, 1.5)
                if gemma:  # gains are 1 + these: 1 to 3
                    value.mul_(2).sub_(1)
            elif value.dim() == 1:
                value.normal_(0, 0.3)
            elif "embed" in name or "lm_head" in name:
                value.normal_(
                    0, 0.05 if gemma else 0.2
                )  # small beside what the layers add, or a tied head repeats the last token
            else:
                value.normal_(0, 1.5 * value.shape[1] ** -0.5)


def greedy(model: PreTrainedModel, prompt: list[int], tokens: int) -> list[int]:
    """What transformers' own greedy ``generate`` answers."""
    ids = torch.tensor([prompt])
    mask = torch.ones_like(ids)
    out = model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=tokens, pad_token_id=0)
    return out[0, len(prompt) :].tolist()
