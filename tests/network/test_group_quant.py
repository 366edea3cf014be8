"""Checkpoints in the 4 bits of AWQ, GPTQ and compressed-tensors: the numbers that they say, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from kits.blocks import dequantise
from kits.four_bit_files import FORMS, LINEARS, write
from kits.native import needs_kernels
from kits.tiny import full_logits
from safetensors.torch import load_file, save_file
from torch import Tensor

from paceline.core.errors import ConfigError
from paceline.model.adapters import AdapterConfig, LowRank, linear_shapes
from paceline.model.attention import make_backend
from paceline.model.decoder import Decoder
from paceline.weights.blocks import GROUPED
from paceline.weights.loader import load_model, read_layout
from paceline.weights.source import read_config, resolve

TOKENS = [5, 17, 200, 33, 33, 319, 0, 8]
EACH = pytest.mark.parametrize("form", FORMS)
Tensors = dict[str, Tensor]
GROUPS = {"awq": 128, "gptq": 32, "compressed": -1, "gptq_v2": -1}  # of a form; 64 else


def load(folder: Path, dtype: str = "auto", native: bool = True, **options: Any) -> Decoder:
    source = resolve(folder, dtype)
    return load_model(source, attention=make_backend(source.dtype, exact=False), native=native, **options)


def numbers(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "plain" / "model.safetensors")


def weight_of(numbers: dict[str, Tensor], layer: int, *names: str) -> Tensor:
    """[n, k] of a fused product."""
    return torch.cat([numbers[f"model.layers.{layer}.{name}.weight"] for name in names])


@EACH
@pytest.mark.parametrize("scale", [torch.float16, torch.bfloat16, torch.float32])
def test_numbers_are_those_that_were_packed(form: str, scale: torch.dtype, tmp_path: Path) -> None:
    folder = write(tmp_path, form, GROUPS.get(form, 64), scale=scale)
    config, packed = read_config(folder), numbers(folder)
    assert config.checkpoint_dtype == "stored"
    found = {piece.source: tensor for piece, tensor in read_layout(folder, config).pieces}
    for name in [name for name in packed if "_proj" in name]:
        tensor = found[name.removeprefix("model.")]
        assert torch.equal(tensor.values(), packed[name]), name
        if scale != torch.float32:
            rows = tensor.stored()
            size, symmetric = GROUPS.get(form, 64), form in ("gptq_sym", "compressed", "compressed_order")
            assert rows.type is GROUPED[128 if size == -1 else size, not symmetric]
            assert (rows.inputs is not None) == ("order" in form)
            columns = slice(None) if rows.inputs is None else rows.inputs
            assert torch.equal(torch.from_numpy(dequantise(rows.type, rows.rows)), packed[name][:, columns]), name
            assert tensor.nbytes == rows.rows.nbytes


@needs_kernels
@EACH
def test_products_are_those_of_the_numbers(form: str, tmp_path: Path) -> None:
    """Beside float64, within 1e-6 of the terms' sizes; and the same bits at every width."""
    folder = write(tmp_path, form, GROUPS.get(form, 64))
    decoder, packed = load(folder), numbers(folder)
    assert decoder.quant == "stored" and decoder.dtype == torch.bfloat16
    weights = decoder.stack.weights
    names = [*LINEARS]
    for index, linear in enumerate(weights.linears):
        own = {0: names[:3], 1: names[3:4], 2: names[4:6], 3: names[6:]}[index % 4]
        weight = weight_of(packed, index // 4, *own).double()
        x = torch.randn(16, weight.shape[1], generator=torch.Generator().manual_seed(index)).bfloat16()
        y = linear.wide(x)
        for width in range(1, 17):
            assert torch.equal(linear.wide(x[:width]), y[:width])
            assert torch.equal(linear.wide(x[16 - width :]), y[16 - width :])
        seen = rounded(x, order_of(folder, index // 4, own[0]))
        size = seen.abs() @ weight.abs().T
        assert ((y - seen @ weight.T).abs() <= 1e-6 * size).all()
        assert weight.std() > 0 and not torch.equal(y[0], y[1])


def order_of(folder: Path, layer: int, name: str) -> Tensor | None:
    """[k] the inputs of a linear, sorted by group."""
    stored, stem = load_file(folder / "model.safetensors"), f"model.layers.{layer}.{name}"
    own = stored.get(f"{stem}.g_idx", stored.get(f"{stem}.weight_g_idx"))
    return None if own is None else own.argsort(stable=True)


def rounded(x: Tensor, order: Tensor | None) -> Tensor:
    """Rows as the products see them: bytes with one scale for 32 inputs that lie together, in float64."""
    x = x if order is None else x[:, order]
    blocks = x.float().view(len(x), -1, 32)
    most = blocks.abs().amax(-1, keepdim=True)
    wide = ((blocks * (torch.full_like(most, 127.0) / most)).round().double() * (most / 127).double()).view(len(x), -1)
    return wide if order is None else torch.empty_like(wide).index_copy_(1, order, wide)


@needs_kernels
def test_adapters_beside_an_act_order_read_their_inputs_in_the_models(tmp_path: Path) -> None:
    """Beside the same numbers in float32; adapters that read inputs out of order would show."""
    folder = write(tmp_path, "gptq_order")
    whole, stored = load(folder / "plain", "float32", native=False), load(folder)
    shapes, generator = linear_shapes(whole.config), torch.Generator().manual_seed(4)
    adapter = LowRank(AdapterConfig(rank=8, alpha=8.0, layers=(0, 1)), shapes)
    with torch.no_grad():
        for tensor in adapter.tensors().values():
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * tensor.shape[1] ** -0.5)
    plain, mine = (full_logits(each, TOKENS, adapter) for each in (whole, stored))
    assert (mine - plain).abs().max() < 0.25 * plain.std() < (plain - full_logits(whole, TOKENS)).abs().max()


def edit_config(folder: Path, change: Callable[[Any], object]) -> None:
    file = folder / "config.json"
    said = json.loads(file.read_text())
    change(said)
    file.write_text(json.dumps(said))


def edit_tensors(folder: Path, change: Callable[[Tensors], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def refused(folder: Path, message: str, dtype: str = "float32") -> None:
    with pytest.raises(ConfigError, match=message):
        load(folder, dtype, native=dtype == "auto")


@pytest.mark.parametrize(
    ("form", "changes", "message"),
    [
        ("awq", {"bits": 8}, "bits = 8.*it must be 4"),
        ("awq", {"version": "gemv"}, "version = 'gemv'.*'gemm'"),
        ("awq", {"group_size": 192}, "256 inputs are not whole groups of 192"),
        ("awq", {"quant_method": "gptq", "sym": False}, "needs I32 .32, 256."),
        ("gptq", {"checkpoint_format": "marlin"}, "checkpoint_format = 'marlin'"),
        ("gptq", {"checkpoint_format": "gptq", "format": "gptq_v2"}, "checkpoint_format.*must be one of them"),
        ("gptq", {"sym": True}, "qzeros.*a zero is not 8"),
        ("gptq", {"dynamic": {"+:.*down.*": {"bits": 8}}}, "dynamic = "),
        ("gptq_order", {"desc_act": False}, "g_idx.*does not have desc_act"),
        ("compressed", {"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme"),
    ],
)
def test_other_configurations_are_refused(form: str, changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = write(tmp_path, form)
    edit_config(folder, lambda said: said["quantization_config"].update(changes))
    refused(folder, message)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_bits": 8}, "num_bits = 8"),
        ({"symmetric": False}, "no weight_zero_point"),
        ({"input_activations": {"num_bits": 8}}, "input_activations"),
        ({"second": True}, "in several ways"),
    ],
)
def test_other_schemes_are_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    def change(said: Any) -> None:
        groups = said["quantization_config"]["config_groups"]
        own = groups["group_0"]
        if "second" in changes:
            groups["group_1"] = own | {"weights": own["weights"] | {"group_size": 128}}
        else:
            (own if "input_activations" in changes else own["weights"]).update(changes)

    folder = write(tmp_path, "compressed")
    edit_config(folder, change)
    refused(folder, message)


Q = "model.layers.1.self_attn.q_proj."


def with_value(name: str, value: float, at: int = 5) -> Callable[[Tensors], object]:
    return lambda tensors: tensors[name].view(-1)[at].fill_(value)


@pytest.mark.parametrize(
    ("form", "change", "message"),
    [
        ("gptq", lambda tensors: tensors.pop(Q + "g_idx"), "no g_idx next to it"),
        ("awq", with_value(Q + "scales", torch.nan), "q_proj.scales.*not finite"),
        ("compressed", with_value(Q + "weight_shape", 8, 0), "weight_shape.*it is not .256, 256."),
        ("gptq_order", with_value(Q + "g_idx", 9), "g_idx.*does not give each of 4 groups 64 inputs"),
        ("gptq", lambda t: t.update({Q + "bias": torch.ones(256)}), "bias.*is not zero"),
        ("awq", lambda t: t.update({Q + "qweight": t[Q + "qweight"].T.contiguous()}), "needs I32 .256, 32."),
    ],
)
def test_other_tensors_are_refused(
    form: str, change: Callable[[Tensors], object], message: str, tmp_path: Path
) -> None:
    folder = write(tmp_path, form)
    edit_tensors(folder, change)
    refused(folder, message)


def test_packed_weights_without_a_configuration_are_refused(tmp_path: Path) -> None:
    folder = write(tmp_path, "gptq")
    edit_config(folder, lambda said: said.pop("quantization_config"))
    refused(folder, "it is quantised, and config.json has no quantization_config")


@needs_kernels
def test_parts_of_a_fused_product_in_different_orders_are_refused_in_blocks_alone(tmp_path: Path) -> None:
    folder = write(tmp_path, "gptq_order")
    edit_tensors(folder, lambda tensors: tensors.update({Q + "g_idx": tensors[Q + "g_idx"].flip(0)}))
    refused(folder, "q_proj.weight and tensor .*k_proj.weight.*different orders", "auto")
    load(folder, "bfloat16")
