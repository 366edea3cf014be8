"""A drafter with a network of its own: one layer over the target's last state, untrained and then trained."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from tempfile import mkdtemp
from typing import ClassVar

import torch
from safetensors.torch import load_file, save_file

from paceline import LLM, SamplingParams
from paceline.draft import Drafter, DrafterConfig, DrafterSpec, TokenTree, option, register
from paceline.train.data import Encoder, Mixture, SourceSpec, load_source
from paceline.train.network import Network
from paceline.weights import zoo
from paceline.weights.source import load_tokenizer


@register
@dataclass(frozen=True, kw_only=True)
class HeadConfig(DrafterConfig):
    """One layer over the target's last state."""

    kind: ClassVar[str] = "head"
    model: str = option("", help="folder with head.safetensors; none: untrained")

    def build(self, context):
        return Head(self, Path(context.find(self.model)) if self.model else None)  # says where there is none


class Head(Drafter):
    def __init__(self, config, folder):
        self.folder = folder
        self.spec = DrafterSpec(name=config.kind, taps=(-1,), network=True, proposes="coupled", default_budget=1)
        self.last = {}  # sequence key -> the last state that was shown, and the position behind it

    def bind(self, target, max_sequences, pool_tokens, device):
        self.handle = target.handle
        self.layer = torch.nn.Linear(target.d_model, target.d_model, device=device, dtype=target.handle.dtype)
        if self.folder:
            self.layer.load_state_dict(load_file(self.folder / "head.safetensors"))

    def observe(self, step):
        for b, (seq, rows) in enumerate(zip(step.sequences, step.hidden_rows, strict=False)):
            if rows.stop > rows.start:  # rows of [rows, d_model]; `first` is the position of the first of them
                self.last[seq.key] = step.hidden[-1][rows.stop - 1], step.first[b] + rows.stop - rows.start

    @torch.inference_mode()
    def draft(self, want):
        drafts = [TokenTree() for _ in want.sequences]
        for draft, (seq, budget, depth) in zip(drafts, want.rows(), strict=True):
            state, after = self.last.get(seq.key, (None, -1))
            if min(budget, depth) > 0 and after == len(seq.tokens) - 1:  # of the token before the root
                normed = self.handle.final(state[None])
                logits = self.handle.logits(normed + torch.nn.functional.silu(self.layer(normed)), normed=True)
                token = int(seq.sampler.choose(logits, None, [len(seq.tokens)]))
                draft.add(0, token, float(logits.log_softmax(-1)[0, token]))
        return drafts

    def release(self, keys):
        for key in keys:
            self.last.pop(key, None)


PROMPTS = ["Paris is", "The king"]
PARAMS = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)


def train(texts, folder):
    """Teach the layer some texts; the target in float32 runs on every batch."""
    place = zoo.find("paceline-small")
    (folder / "data.txt").write_text("\n<|endoftext|>\n".join(texts))
    examples = load_source(SourceSpec(file=f"{folder}/data.txt"), Encoder(load_tokenizer(place), 64))
    target = Network.load(place, frozen=True)
    layer = torch.nn.Linear(target.config.d_model, target.config.d_model)
    adam = torch.optim.AdamW(layer.parameters(), 3e-3)
    for batch in islice(Mixture([(1.0, examples)], seed=0).batches(rows=2, length=64), 16):  # it never ends
        states = target(batch)[:, :-2]  # [B, T - 2, d_model], after the final norm
        logits = target.logits(states + torch.nn.functional.silu(layer(states)))
        same = (batch.documents[:, 2:] == batch.documents[:, :-2]) & (batch.documents[:, 2:] >= 0)
        loss = torch.nn.functional.cross_entropy(logits[same], batch.tokens[:, 2:][same])
        adam.zero_grad(), loss.backward(), adam.step()
    save_file(layer.state_dict(), folder / "head.safetensors")


def main() -> None:
    plain = [answer.outputs[0] for answer in LLM("paceline-small").generate(PROMPTS, PARAMS)]

    def drafted(drafter):
        answers = LLM("paceline-small", drafter=drafter, budget=1).generate(PROMPTS, PARAMS)
        assert [answer.outputs[0].token_ids for answer in answers] == [answer.token_ids for answer in plain]
        assert all(answer.stats.drafted > 0 for answer in answers), answers[0].stats.off_reason
        return answers[0].stats

    print("untrained", drafted("head").summary())
    folder = Path(mkdtemp())
    train([prompt + answer.text for prompt, answer in zip(PROMPTS, plain, strict=True)], folder)
    trained = drafted(f"head:{folder}")
    assert trained.accepted > 0
    print("trained", trained.summary())


if __name__ == "__main__":
    main()
