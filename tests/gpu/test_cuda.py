"""The engine on a CUDA device: against transformers, and against itself with a drafter. Skipped without one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from paceline import LLM, SamplingParams
from paceline.model.adapters import AdapterConfig, linear_shapes
from paceline.papers.streaming.model import StreamConfig, StreamSet
from paceline.weights.source import read_config

pytestmark = pytest.mark.gpu

VOCAB = 200
TOKENS = 48
LENGTHS = (1, 2, 7, 16, 33, 64, 130, 200)
GREEDY = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
SEEDED = SamplingParams(temperature=0.9, top_p=0.95, seed=5, max_tokens=TOKENS, ignore_eos=True)
DRAFTERS = ["ngram", "suffix", "draft_model:{model},depth=4"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama whose greedy output keeps varying."""
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        rope_parameters={"rope_type": "default", "rope_theta": 100.0},
    )
    torch.manual_seed(2)
    model = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for name, value in model.named_parameters():
            if "norm" in name:
                value.uniform_(0.5, 1.5)
            elif "embed" in name or "lm_head" in name:
                value.normal_(0, 0.2)
            else:
                value.normal_(0, 1.5 * value.shape[1] ** -0.5)
    model.generation_config.eos_token_id = model.config.eos_token_id = None
    path = tmp_path_factory.mktemp("llama")
    model.save_pretrained(path)
    return path


@pytest.fixture(autouse=True)
def full_float32() -> None:
    """TF32 keeps ten bits of a float32: parity needs them all."""
    torch.backends.cuda.matmul.allow_tf32 = False


def prompts() -> list[dict[str, list[int]]]:
    generator = torch.Generator().manual_seed(7)
    return [{"prompt_token_ids": torch.randint(3, VOCAB, (n,), generator=generator).tolist()} for n in LENGTHS]


def answers(
    folder: Path, params: SamplingParams = GREEDY, one_by_one: bool = False, **options: object
) -> list[list[int]]:
    llm = LLM(str(folder), device="cuda", **options)
    groups = [[prompt] for prompt in prompts()] if one_by_one else [prompts()]
    return [output.outputs[0].token_ids for group in groups for output in llm.generate(group, params)]


def test_float32_ids_equal_those_of_transformers(folder: Path) -> None:
    """On the CPU in float32, which is the stricter of the two oracles; all prompts at once and in chunks."""
    reference = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    expected = []
    for prompt in prompts():
        ids = torch.tensor([prompt["prompt_token_ids"]])
        out = reference.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=TOKENS, pad_token_id=0
        )
        expected.append(out[0, ids.shape[1] :].tolist())
    assert sum(len(set(ids)) for ids in expected) / len(expected) >= 8, "the answers hardly vary"
    assert answers(folder, dtype="float32", max_batch_rows=96) == expected


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_drafter_changes_no_id(folder: Path, drafter: str, params: SamplingParams) -> None:
    plain = answers(folder, params, dtype="float64")
    assert answers(folder, params, dtype="float64", drafter=drafter.format(model=folder)) == plain


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_exact_ids_depend_on_neither_width_nor_batch(folder: Path, dtype: str) -> None:
    """One request at a time, all at once, in chunks, and with wide drafts: one answer each."""
    alone = answers(folder, SEEDED, dtype=dtype, exact=True, one_by_one=True)
    drafter = f"draft_model:{folder},depth=6"
    for options in ({}, {"max_batch_rows": 40}, {"drafter": drafter}, {"drafter": "ngram", "max_sequences": 3}):
        assert answers(folder, SEEDED, dtype=dtype, exact=True, **options) == alone, options


def test_the_pool_is_whole_after_a_batch(folder: Path) -> None:
    llm = LLM(str(folder), device="cuda", dtype="float32", drafter="ngram")
    llm.generate(prompts(), GREEDY)
    llm.engine.pool.check_integrity()


@pytest.mark.parametrize("option", ["at=nodes", "at=frontier", "at=nodes,prune_count=6"])
@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_streams_change_no_id(folder: Path, tmp_path: Path, params: SamplingParams, option: str) -> None:
    """A random lossless set, float64 so that no rounding can be blamed."""
    shape = read_config(folder)
    config = StreamConfig(
        gamma=3,
        msa_layers=1,
        num_layers=shape.num_layers,
        d_model=shape.d_model,
        vocab_size=shape.vocab_size,
        adapter=AdapterConfig(layers=(shape.num_layers - 1,)),
    )
    StreamSet.fresh(config, linear_shapes(shape), torch.Generator().manual_seed(1)).save(tmp_path)
    plain = answers(folder, params, dtype="float64")
    drafter = f"streams:{tmp_path},k=12,nodes=20,{option}"
    assert answers(folder, params, dtype="float64", drafter=drafter, budget=20) == plain
