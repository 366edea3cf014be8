"""The shape of a Llama-family network that is trained."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..core.errors import ConfigError
from ..core.options import option


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """A Llama-family network."""

    layers: int = option(12, help="decoder layers")
    d_model: int = option(384, help="width of the residual stream")
    d_ff: int = option(1024, help="width of the gated MLP")
    heads: int = option(6, help="query heads")
    kv_heads: int = option(6, help="key and value heads")
    vocab_size: int = option(8192, help="tokens; that of the tokenizer")
    context: int = option(2048, help="positions")
    rope_theta: float = option(10000.0, help="base of the rotary embedding")
    tied: bool = option(True, help="the output head is the embedding table")

    def config(self, bos: int, eos: int, pad: int | None) -> dict[str, Any]:
        """Its config.json, as transformers writes one."""
        if self.d_model % self.heads or self.heads % self.kv_heads:
            raise ConfigError(
                f"d_model={self.d_model}, heads={self.heads}, kv_heads={self.kv_heads}",
                "heads must divide d_model, and kv_heads heads",
                "change one of them",
            )
        return {
            "architectures": ["LlamaForCausalLM"],
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": bos,
            "eos_token_id": eos,
            "pad_token_id": pad,
            "head_dim": self.d_model // self.heads,
            "hidden_act": "silu",
            "hidden_size": self.d_model,
            "initializer_range": 0.02,
            "intermediate_size": self.d_ff,
            "max_position_embeddings": self.context,
            "mlp_bias": False,
            "model_type": "llama",
            "num_attention_heads": self.heads,
            "num_hidden_layers": self.layers,
            "num_key_value_heads": self.kv_heads,
            "rms_norm_eps": 1e-6,
            "rope_parameters": {"rope_theta": self.rope_theta, "rope_type": "default"},
            "tie_word_embeddings": self.tied,
            "use_cache": True,
            "vocab_size": self.vocab_size,
        }
