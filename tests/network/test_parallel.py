"""What a rank has of a checkpoint, and what ranks, here threads, make of it together."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from kits.native import read_in_passes
from kits.tiny import tiny_config
from torch import Tensor

from paceline import LLM
from paceline.core.errors import CapabilityError, ConfigError
from paceline.model.attention import make_backend
from paceline.model.decoder import Decoder
from paceline.model.joins import RankMemory
from paceline.model.parallel import Ranks, Share
from paceline.weights import loader, zoo
from paceline.weights.loader import load_model
from paceline.weights.source import read_config, resolve

sys.path.insert(0, str(Path(__file__).parents[1] / "parity"))
from checkpoints import MAKERS, build

# A tied head, biases, one tensor for q, k, v, norms of another kind.
FEW = {"llama3", "llama-biased", "phi3", "gemma3"}


def load(folder: Path, rank: int, memory: RankMemory, by_outputs: bool = False, **how: Any) -> Decoder:
    source = resolve(folder, how.pop("dtype", "float64"))
    share = Share(source.shape, rank, memory.count, by_outputs)
    how = {"attention": make_backend(torch.float64)} | how
    joins = memory.joins()
    joins.struct.rank = joins.rank = rank
    return load_model(source, ranks=Ranks(share, joins), **how)


def answer(decoder: Decoder) -> Tensor:
    return torch.cat(read_in_passes(decoder, (7, 11)))


@pytest.mark.parametrize("family", [pytest.param(f, marks=() if f in FEW else pytest.mark.full) for f in MAKERS])
def test_ranks_make_the_logits_of_one_process(family: str, tmp_path: Path) -> None:
    """By inputs and by outputs; of 4 ranks each two have one head of K and V, or each has one of its own."""
    build(family, tmp_path, vocab_size=202)  # which 4 do not divide
    whole = answer(load_model(resolve(tmp_path, "float64"), attention=make_backend(torch.float64)))
    heads = read_config(tmp_path).num_kv_heads
    for count, by_outputs in ((2, False), (2, True), (4, False)):
        if max(count, heads) % min(count, heads):
            continue
        memory = RankMemory(count)
        with ThreadPoolExecutor(count) as threads:
            decoders = [load(tmp_path, rank, memory, by_outputs) for rank in range(count)]
            for made in threads.map(answer, decoders):
                assert torch.allclose(made, whole, rtol=0, atol=1e-9) and made.std() > 0.1
        memory.close()


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_a_rank_reads_and_holds_its_part(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of what is read, and of the memory, within 3%."""
    folder, read, get = zoo.find("paceline-small"), list[int](), loader.get_tensor
    assert folder is not None

    def reading(*given: Any) -> Tensor:
        found = get(*given)
        read.append(found.numel())
        return found

    monkeypatch.setattr(loader, "get_tensor", reading)
    how: dict[str, Any] = {"attention": make_backend(torch.bfloat16), "native": True}
    sizes, reads = [], []
    for rank in (None, 0, 1):
        read.clear()
        part = (
            {}
            if rank is None
            else {"rank": rank, "memory": RankMemory(2), "by_outputs": dtype == "int8", "dtype": dtype}
        )
        decoder = load(folder, **how, **part) if part else load_model(resolve(folder, dtype), **how)
        assert decoder.stack is not None
        sizes.append(sum(part.nbytes for part in decoder.stack.weights.products) + decoder.embedding.nbytes)
        reads.append(sum(read))
    assert all(abs(2 * part / sizes[0] - 1) < 0.03 for part in sizes[1:])
    assert all(abs(2 * part / reads[0] - 1) < 0.03 for part in reads[1:])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tensor_parallel": 0}, "tensor_parallel=0"),
        ({"tensor_parallel": 4}, "4 ranks do not divide heads: 6"),
        ({"tensor_parallel": 2, "pipeline": 2}, "cut into stages or into ranks"),
        ({"tensor_parallel": 2, "exact": True, "kernels": "torch"}, "compiled layers"),
        ({"tensor_parallel": 2, "exact": True, "dtype": "float64"}, "compiled layers"),
    ],
)
def test_options_that_ranks_cannot_have_are_refused_before_anything_is_loaded(
    options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        LLM("paceline-small", **options)


def test_shapes_that_ranks_do_not_divide_are_refused() -> None:
    config = tiny_config()
    for changes, count, by_outputs, words in (
        ({"num_heads": 6, "num_kv_heads": 3, "d_ff": 48}, 4, False, "heads: 6"),
        ({"d_ff": 50}, 4, False, "d_ff: 50"),
        ({"num_heads": 6, "num_kv_heads": 3}, 2, False, "cannot share 3 heads"),
        ({"vocab_size": 3}, 4, False, "vocabulary"),
        ({}, 2, True, "d_ff: 48 in pieces of 16"),
        ({"d_ff": 64}, 4, True, "width: 32 in pieces of 16"),
    ):
        with pytest.raises(ConfigError, match=words):
            Share(replace(config, **changes), 0, count, by_outputs)
    for changes in ({"family": "gpt"}, {"checkpoint_dtype": "stored"}):
        with pytest.raises(CapabilityError):
            Share(replace(config, **changes), 0, 2)
