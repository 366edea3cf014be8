"""Hot tokens: the part of the vocabulary that a draft's head is computed for.

A text is made of few of the tokens that there are, and a draft's head is read once a drafted token: over the likeliest
quarter of the vocabulary it takes a quarter of the time. Tokens that are not hot are never drafted; the target still
predicts them. Sources: Lyanna, section 6.1; FR-Spec (Zhao et al. 2025), section 3, which found it for EAGLE's head.

A drafter's folder names its hot tokens in ``hot.json``: ``{"tokens": [ids]}``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core.errors import ConfigError
from ..core.options import option
from ..kernels import abi
from ..kernels.linear import NativeLinear
from ..weights.files import is_file, read_json
from .linear import LinearOp, Quant

FILE = "hot.json"
UNITS = 64  # inputs whose weights are read off a head at once
_REMEDY = "restore the file, or remove it: all tokens are drafted then"


def hot_share() -> float:
    """Return the field of a recipe's options that states how much of the vocabulary is hot."""
    share: float = option(
        0.0, help="share of the vocabulary, most frequent first, that is drafted; 0: all of it", minimum=0, below=1
    )
    return share


def load_hot(folder: Path | None, vocab: int) -> Tensor | None:
    """Return [H] int64, ascending: the hot tokens that a drafter's folder names; None: it names none.

    Raises:
        ConfigError: a file that cannot be read, that names no token, one twice, or one that there is not.
    """
    if folder is None or not is_file(folder / FILE):
        return None
    content = read_json(folder / FILE, _REMEDY)
    ids = content.get("tokens") if isinstance(content, dict) else None
    if not isinstance(ids, list) or not ids or not all(type(i) is int and 0 <= i < vocab for i in ids):
        raise ConfigError(str(folder / FILE), f"tokens is not a list of ids from 0 to {vocab - 1}", _REMEDY)
    hot = torch.tensor(ids).unique()
    if len(hot) != len(ids):
        raise ConfigError(str(folder / FILE), "it names a token twice", _REMEDY)
    return hot


def save_hot(tokens: Tensor, folder: Path) -> None:
    """Write `FILE`."""
    (folder / FILE).write_text(json.dumps({"tokens": sorted(tokens.tolist())}) + "\n", encoding="utf-8")


def most_frequent(occurrences: Any, count: int) -> Tensor:
    """Return [count] int64, ascending: the tokens that occur most often, of equals the first ones.

    ``occurrences`` [V] are counts or shares.
    """
    return torch.as_tensor(occurrences).argsort(descending=True, stable=True)[:count].sort().values


def places_of(tokens: Tensor, vocab: int) -> Tensor:
    """Return [vocab] int64 the place of each token among the hot ``tokens`` [H]; H of all others."""
    places = torch.full((vocab,), len(tokens), device=tokens.device)
    places[tokens] = torch.arange(len(tokens), device=tokens.device)
    return places


def hot_rows(head: LinearOp, tokens: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """Return [H, width] the weights of a head for ``tokens`` [H], whatever form it is kept in.

    They are read off by unit vectors in ``dtype`` (after ``width``, zeros).
    """
    rows = torch.empty(len(tokens), width)
    inputs = head.struct.k if isinstance(head, NativeLinear) else width
    for first in range(0, width, UNITS):
        units = F.one_hot(torch.arange(first, min(first + UNITS, width)), inputs).to(dtype)
        rows[:, first : first + len(units)] = head.wide(units)[:, tokens].t()
    return rows


def cut_head(
    model: abi.CModel, head: NativeLinear, tokens: Tensor, dtype: torch.dtype, quant: Quant | None = None
) -> NativeLinear:
    """Return the head of a compiled model over hot ``tokens`` [H] int64, ascending, alone, which becomes the model's.

    Next to bf16 states its weights are bytes, or as requested. ``head`` is the whole one.
    """
    rows = hot_rows(head, tokens, model.d_model, dtype).to(dtype)
    bits = "int8" if quant is None or quant == "stored" else quant
    linear = NativeLinear(rows, None, bits if dtype == torch.bfloat16 else None)
    named = F.pad(tokens, (0, -len(tokens) % 16))
    model.head, model.vocab, model.of_output = linear.struct, len(tokens), named.data_ptr()
    model.held = linear, named
    return linear


def masked(logits: Tensor, hot: Tensor) -> Tensor:
    """Return [.., V] the same with -inf for tokens that are not hot."""
    return torch.full_like(logits, -torch.inf).index_copy_(-1, hot, logits[..., hot])
