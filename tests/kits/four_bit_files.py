"""Small Llamas in the 4 bits of AWQ, GPTQ and compressed-tensors, packed here from what these formats define, value by
value, and the same weights as a plain checkpoint."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from kits.gguf_files import CONFIG, LAYERS, NAMES, SHAPES, VOCABULARY, WIDTH

LINEARS = {NAMES[stem]: shape for stem, shape in SHAPES.items()}
SHARED = {"q_proj": "attention", "k_proj": "attention", "v_proj": "attention", "gate_proj": "mlp", "up_proj": "mlp"}
# by name, what ``quantization_config`` says
FORMS: dict[str, dict[str, Any]] = {
    "awq": {"quant_method": "awq", "bits": 4, "version": "gemm", "zero_point": True},
    "gptq": {"quant_method": "gptq", "bits": 4, "sym": False, "desc_act": False},
    "gptq_sym": {"quant_method": "gptq", "bits": 4, "sym": True, "desc_act": False, "checkpoint_format": "gptq"},
    "gptq_v2": {"quant_method": "gptq", "bits": 4, "sym": False, "desc_act": False, "checkpoint_format": "gptq_v2"},
    "gptq_order": {"quant_method": "gptq", "bits": 4, "sym": False, "desc_act": True},
    "compressed": {"quant_method": "compressed-tensors", "symmetric": True},
    "compressed_zeros": {"quant_method": "compressed-tensors", "symmetric": False},
    "compressed_order": {"quant_method": "compressed-tensors", "symmetric": True, "actorder": "group"},
}


def write(folder: Path, form: str, group: int = 64, seed: int = 0, scale: torch.dtype = torch.float16) -> Path:
    """A checkpoint in one of `FORMS`; beside it, in ``folder / "plain"``, its numbers in float32.

    Args:
        group: inputs that share a scale; -1: all.
        scale: as what scales are stored.
    """
    rng = np.random.default_rng(seed)
    said, orders = FORMS[form], {}
    symmetric = said.get("sym", said.get("symmetric", False))
    plain: dict[str, Tensor] = {}

    def normal(*shape: int) -> Tensor:
        return torch.from_numpy(rng.standard_normal(shape)).half()

    plain["model.embed_tokens.weight"], plain["lm_head.weight"] = normal(VOCABULARY, WIDTH), normal(VOCABULARY, WIDTH)
    plain["model.norm.weight"] = normal(WIDTH).abs() + 0.5
    packed = dict(plain)
    for layer in range(LAYERS):
        for norm in ("input_layernorm", "post_attention_layernorm"):
            name = f"model.layers.{layer}.{norm}.weight"
            plain[name] = packed[name] = normal(WIDTH).abs() + 0.5
        for name, (n, k) in LINEARS.items():
            size = k if group == -1 else group
            q = rng.integers(0, 16, (n, k))
            z = np.full((n, k // size), 8) if symmetric else rng.integers(0, 16, (n, k // size))
            s = torch.from_numpy(rng.uniform(0.2, 1.0, (n, k // size)) * 0.2 * k**-0.5).to(scale)
            own = np.arange(k) // size
            if form.endswith("order"):  # linears that read the same states have one order
                last = name.split(".")[1]
                own = orders.setdefault((layer, SHARED.get(last, last)), rng.permutation(own))
            stem = f"model.layers.{layer}.{name}"
            plain[f"{stem}.weight"] = torch.from_numpy((q - z[:, own]) * s.double().numpy()[:, own]).float()
            parts = _PACK[said["quant_method"]](form, q, z, s, own)
            packed |= {f"{stem}.{last}": value.contiguous() for last, value in parts.items()}
    _save(folder, packed, {"quantization_config": config(form, group)})
    _save(folder / "plain", plain, {"dtype": "float32"})
    return folder


def quantise(source: Path, folder: Path, form: str, group: int = 64) -> Path:
    """A checkpoint's linears rounded to one of `FORMS`; all else is as it was."""
    rng, orders, tensors = np.random.default_rng(0), {}, load_file(source / "model.safetensors")
    symmetric = FORMS[form].get("sym", FORMS[form].get("symmetric", False))
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        weight = tensors.pop(name).double().numpy()
        own = np.arange(weight.shape[1]) // group
        if form.endswith("order"):
            place, last = name.removesuffix(".weight").rsplit(".", 1)
            own = orders.setdefault((place, SHARED.get(last, last)), rng.permutation(own))
        groups = np.stack([weight[:, own == i] for i in range(own.max() + 1)], 1)  # [n, groups, inputs]
        low, high = groups.min(2).clip(max=0), groups.max(2).clip(min=0)
        scale = np.maximum(-low, high) / 7.5 if symmetric else (high - low) / 15
        s = torch.from_numpy(np.maximum(scale, 1e-4)).half()
        z = np.full(low.shape, 8) if symmetric else np.rint(-low / s.double().numpy()).astype(int).clip(0, 15)
        q = (np.rint(weight / s.double().numpy()[:, own]).astype(int) + z[:, own]).clip(0, 15)
        parts = _PACK[FORMS[form]["quant_method"]](form, q, z, s, own)
        tensors |= {name.removesuffix("weight") + last: value.contiguous() for last, value in parts.items()}
    shutil.copytree(source, folder, dirs_exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    said = json.loads((source / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(said | {"quantization_config": config(form, group)}))
    return folder


def config(form: str, group: int) -> dict[str, Any]:
    """``quantization_config``, as the writers' packages have it."""
    said = dict(FORMS[form])
    if said["quant_method"] != "compressed-tensors":
        return said | {"group_size": group}
    weights = {"num_bits": 4, "type": "int", "dynamic": False, "symmetric": said["symmetric"], "group_size": group}
    weights |= {"strategy": "channel" if group == -1 else "group", "actorder": said.get("actorder")}
    scheme = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    said = {"quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"]}
    return said | {"quantization_status": "compressed", "config_groups": {"group_0": scheme}, "kv_cache_scheme": None}


def _save(folder: Path, tensors: dict[str, Tensor], more: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: value.contiguous() for name, value in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG | {"dtype": "float16", "tie_word_embeddings": False} | more))


def _words(values: np.ndarray, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """[rows, columns / 8] int32: value ``order[i]`` of each eight in bits 4 i .. 4 i + 3; less than zero borrows."""
    words = np.zeros((len(values), values.shape[1] // 8), np.int64)
    for column in range(words.shape[1]):
        for i, place in enumerate(order):
            words[:, column] += values[:, column * 8 + place] << 4 * i
    return torch.from_numpy(words.astype(np.uint32).view(np.int32))


def _awq(form: str, q: np.ndarray, z: np.ndarray, s: Tensor, own: np.ndarray) -> dict[str, Tensor]:
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    return {"qweight": _words(q.T, order), "qzeros": _words(z.T, order), "scales": s.T}


def _gptq(form: str, q: np.ndarray, z: np.ndarray, s: Tensor, own: np.ndarray) -> dict[str, Tensor]:
    zeros = _words(z.T if form == "gptq_v2" else z.T - 1)
    index = torch.from_numpy(own.astype(np.int32))
    return {"qweight": _words(q).T, "qzeros": zeros, "scales": s.T, "g_idx": index}


def _compressed(form: str, q: np.ndarray, z: np.ndarray, s: Tensor, own: np.ndarray) -> dict[str, Tensor]:
    parts = {"weight_packed": _words(q), "weight_scale": s, "weight_shape": torch.tensor(q.shape)}
    if form == "compressed_zeros":
        parts["weight_zero_point"] = _words(z.T).T
    if form == "compressed_order":
        parts["weight_g_idx"] = torch.from_numpy(own.astype(np.int32))
    return parts


_PACK = {"awq": _awq, "gptq": _gptq, "compressed-tensors": _compressed}
