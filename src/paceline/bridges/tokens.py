"""A drafter that reads tokens alone and drafts chains for another engine.

Such an engine has no tapped states, no tree attention and no place for a network of ours: what it can use is a chain of
tokens, drafted from the text. Look-ups do that; drafters that need more are refused.
"""

from __future__ import annotations

from collections import abc
from typing import Any, cast

import torch

from ..core.errors import CapabilityError, ConfigError
from ..core.sampling import SamplingParams, SequenceSampler
from ..core.sequence import Sequence
from ..draft.base import Drafter, DrafterSpec, DraftRequest, StepFeatures
from ..draft.registry import DrafterConfig, build, parse
from ..model.decoder import TargetInfo

_GREEDY = SamplingParams(temperature=0)
_ABSENT = cast(Any, None)  # needs that a drafter of tokens does not have
_REMEDY = "use ngram, suffix, prediction, a hybrid of them, or a drafter of your own that reads tokens alone"


class TokenDrafter:
    """Drafts chains for another engine's sequences, and remembers as the drafter does, until it is dropped.

    Args:
        drafter: its text (``"suffix,depth=8"``), its config, or the drafter itself, which must be bound nowhere else.

    Raises:
        ConfigError: no such drafter, or an option that it does not have.
        CapabilityError: a drafter that reads more than tokens.
    """

    def __init__(self, drafter: str | DrafterConfig | Drafter) -> None:
        self.drafter = drafter if isinstance(drafter, Drafter) else _built(drafter)
        _check(self.drafter.spec)
        self._vocab_size: int | None = None
        self._views: dict[int, Sequence] = {}

    def bind(self, vocab_size: int, eos_ids: abc.Sequence[int], max_position: int, max_sequences: int = 1) -> None:
        """Set the target; later calls must have the same vocabulary, and do nothing.

        Raises:
            CapabilityError: it drafts for a target with another vocabulary.
        """
        if self._vocab_size not in (None, vocab_size):
            wrong = f"it drafts for a model of {self._vocab_size} tokens, this one has {vocab_size}"
            raise CapabilityError(f"drafter {self.drafter.spec.name!r}", wrong, "give each model a drafter of its own")
        if self._vocab_size is None:
            self._vocab_size = vocab_size
            target = TargetInfo(
                name="the model of another engine",
                num_layers=0,
                d_model=0,
                vocab_size=vocab_size,
                max_position=max_position,
                dtype=torch.float32,
                eos_ids=tuple(eos_ids),
                bos_id=None,
                tokenizer=None,
                handle=_ABSENT,
                decoder=_ABSENT,
            )
            self.drafter.bind(target, max_sequences, max_sequences * max_position, torch.device("cpu"))

    def open(
        self,
        key: int,
        tokens: abc.Sequence[int],
        prompt_len: int,
        max_len: int | None = None,
        prediction: abc.Sequence[int] = (),
    ) -> None:
        """Begin with a sequence.

        Args:
            key: unique until `close`.
            tokens: of the text so far, of which ``prompt_len`` are the prompt's.
            max_len: that the text cannot outgrow.
            prediction: tokens that the output is likely to repeat.
        """
        assert self._vocab_size is not None, "bind comes before open"
        prompt = list(tokens[:prompt_len])
        sampler = SequenceSampler(_GREEDY, prompt, seed=0, sample_index=0, vocab_size=self._vocab_size)
        view = Sequence(key, list(tokens), prompt_len, sampler, max_len, prediction=tuple(prediction))
        self._views[key] = view

    def extend(self, key: int, tokens: abc.Sequence[int], accepted: int = 0) -> None:
        """Append ``tokens`` to the text, of which the first ``accepted`` were drafted."""
        view = self._views[key]
        view.tokens += tokens
        if self.drafter.spec.observes:
            self.drafter.observe(StepFeatures([view], [list(tokens)], [accepted], [range(1, accepted + 1)]))

    def chains(self, rooms: dict[int, int]) -> dict[int, list[int]]:
        """Draft tokens that follow the text, for several sequences at once.

        Args:
            rooms: most tokens of each chain, by sequence.
        """
        views, wanted = [self._views[key] for key in rooms], [*rooms.values()]
        budgets = [room and self.drafter.spec.default_budget for room in wanted]
        found = self.drafter.propose(DraftRequest(views, budgets, wanted))
        scores = found.scores or [[0.0] * count for count in found.counts]
        rows = zip(rooms.items(), found.tokens, found.parents, scores, strict=True)
        return {key: _best_chain(tokens, parents, score)[:room] for (key, room), tokens, parents, score in rows}

    def close(self, key: int) -> None:
        """End the sequence: the drafter may remember its output."""
        if self._views.pop(key, None) is not None:
            self.drafter.release([key])


def _built(drafter: str | DrafterConfig) -> Drafter:
    """Return the drafter of a text or a config that needs no weights."""
    config = parse(drafter)
    if config is None or config.kind == "none":
        raise ConfigError(f"drafter={drafter!r}", "there is nothing to draft with", _REMEDY)
    for part in getattr(config, "chosen", (config,)):
        if part.weights:
            raise CapabilityError(f"drafter={part.kind!r}", "it runs a trained network of ours", _REMEDY)
    return build(config)


def _check(spec: DrafterSpec) -> None:
    """Refuse a drafter that reads more than tokens."""
    reasons = {
        "runs a network": spec.network or spec.cached,
        "reads the states of the target's layers": spec.taps,
        "drafts in the target's pass": spec.in_pass,
        "writes into the target's K/V": spec.scratch,
    }
    for wrong, found in reasons.items():
        if found:
            raise CapabilityError(f"drafter {spec.name!r}", f"it {wrong}", _REMEDY)


def _best_chain(tokens: abc.Sequence[int], parents: abc.Sequence[int], scores: abc.Sequence[float]) -> list[int]:
    """Return the path of a tree from the root through the best scored children; of equals through the earlier one."""
    chain, node = [], 0
    while children := [i for i, parent in enumerate(parents) if parent == node and i > node]:
        node = max(children, key=lambda i: (scores[i], -i))
        chain.append(tokens[node])
    return chain
