"""Heads of the library speculators: the config of an EAGLE-3 head, in the form that other published heads have.

Tensors are named alike. The config has the layer's own as ``transformer_layer_config``, and next to it what differs
from EAGLE-3 as published; `eagle3` refuses what this engine does not compute.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...core.errors import CapabilityError, ConfigError
from ...core.options import shown

TYPE, LAYER = "speculators_model_type", "transformer_layer_config"
COPIED = ("draft_vocab_size", "eagle_aux_hidden_state_layer_ids", "dtype", "torch_dtype")
VARIANTS = {  # what a head does, by the switch that is on
    "norm_before_residual": "norms a state before it is added",
    "norm_before_fc": "norms the tapped states together",
    "fc_norm": "norms each tapped state",
    "norm_output": "feeds normed states back",
}


def is_speculators(config: Mapping[str, Any]) -> bool:
    """Return whether this is a config of that library."""
    return TYPE in config or "speculators_config" in config


def flat(config: Mapping[str, Any], place: Path) -> dict[str, Any]:
    """Return the config of the layer, with what EAGLE-3 heads have next to it.

    Raises:
        ConfigError: no layer in it.
        CapabilityError: another algorithm, or another family of layers.
    """
    from transformers import LlamaConfig

    subject = f"eagle head {str(place)!r}"
    remedy = "use a head of EAGLE-3 with a Llama layer"
    kind, layer = config.get(TYPE), config.get(LAYER)
    if kind != "eagle3":
        raise CapabilityError(subject, f"its {TYPE} is {shown(kind)}, not eagle3", remedy)
    if not isinstance(layer, dict):
        raise ConfigError(subject, f"its {LAYER} is {shown(layer)}, no object", "restore the file")
    if layer.get("model_type", "llama") != "llama":
        raise CapabilityError(subject, f"its layer is of the family {shown(layer['model_type'])}", remedy)
    whole = LlamaConfig(**layer).to_dict()  # the file leaves out what is transformers' default
    beside = {name: config[name] for name in COPIED if config.get(name) is not None}
    beside |= {switch: True for switch in VARIANTS if config.get(switch)}
    return {**whole, **beside, "architectures": ["LlamaForCausalLMEagle3"], "tie_word_embeddings": False}
