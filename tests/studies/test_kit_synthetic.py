"""The synthetic drafter: right as often as asked, and no token changes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from kit.synthetic import SyntheticConfig, write_answers
from kits.tiny import VOCAB, assemble, run, tiny_decoder
from scipy.stats import chi2

from paceline.core.sampling import SamplingParams
from paceline.core.stats import SpecStats

LENGTH = 96


@pytest.mark.parametrize(("temperature", "accept"), [(0, 1), (1, 0.6)])
def test_its_rate_is_the_stated_one_and_ids_are_plain_decodings(
    tmp_path: Path, temperature: float, accept: float
) -> None:
    """Chi-square over the depths. Every depth has 150 offers or more."""
    target, draw = tiny_decoder(), torch.Generator().manual_seed(3)
    prompts = torch.randint(10, VOCAB, (24 if accept == 0.6 else 6, 9), generator=draw).tolist()
    params = SamplingParams(temperature=temperature, seed=5, max_tokens=LENGTH, ignore_eos=True)
    jobs = [(prompt, params) for prompt in prompts]
    plain = [output.outputs[0].token_ids for output in run(assemble(decoder=target), jobs)]
    write_answers(path := tmp_path / "answers.jsonl", zip(prompts, plain, strict=True))
    outputs = run(assemble(SyntheticConfig(answers=str(path), accept=accept, depth=4), decoder=target), jobs)
    assert [output.outputs[0].token_ids for output in outputs] == plain
    stats = SpecStats()
    for output in outputs:
        stats = stats.merge(output.stats)
    offered, accepted = stats.depth_offered, stats.depth_accepted
    if accept == 1:  # the first pass has no draft, and every later one brings one token or five
        assert stats.passes == len(jobs) * (1 + -(-(LENGTH - 1) // 5))
        return
    variance = accept * (1 - accept)
    distance = sum((a - n * accept) ** 2 / (n * variance) for n, a in zip(offered, accepted, strict=True))
    assert min(offered) >= 100 and chi2.sf(distance, df=4) > 0.01, list(zip(offered, accepted, strict=True))
