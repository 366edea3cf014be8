"""From packed logits to accepted paths: the verifiers by name."""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass

import torch
from torch import Tensor

from ..core import verify
from ..core.errors import CapabilityError, ConfigError
from ..core.sequence import Sequence
from ..core.tree import TokenTree
from ..core.verify import Accepted
from ..draft.base import DrafterSpec
from ..model.decoder import likeliest as likeliest
from .base import DEFAULT_VERIFIER as DEFAULT_VERIFIER

# (sequences [B], trees [B], packed logits [sum of nodes, V]) -> verdicts [B]
Verifier = abc.Callable[[abc.Sequence[Sequence], abc.Sequence[TokenTree], Tensor], list[Accepted]]


def choose_nodes(sequence: Sequence, logits: Tensor, tree: TokenTree | None = None) -> Tensor:
    """[n] int64: one sequence's own choice after each of its nodes, as plain decoding would make it.

    Where its rules fail at the root, that is noted, and the rest continues. Where they fail below it, where plain
    decoding may never come, the root alone has a choice, and the nodes below have -1.

    Args:
        sequence: whose sampler chooses.
        logits: [n, V] raw.
        tree: of the nodes; None: the root alone.
    """
    if sequence.sampler.plain:
        return likeliest(logits)
    depths, paths = [0], None
    if tree is not None:
        depths, paths = tree.depths(), tree.path_tokens()
    try:
        return sequence.sampler.choose(logits, paths, [len(sequence.tokens) + depth for depth in depths])
    except Exception as error:
        if len(depths) > 1:
            root = choose_nodes(sequence, logits[:1])
            return torch.cat([root, root.new_full((len(depths) - 1,), -1)])
        sequence.fault = error
        return likeliest(logits)  # a placeholder: it is not emitted


def _against_q(rule: abc.Callable[..., list[Accepted]]) -> Verifier:
    """Return a verifier that weighs p against the q that the drafts were drawn from."""

    def verifier(sequences: abc.Sequence[Sequence], trees: abc.Sequence[TokenTree], logits: Tensor) -> list[Accepted]:
        """p, uniforms and residual noise of every node, for ``rule``."""
        depths, counts = [tree.depths() for tree in trees], [1 + len(tree) for tree in trees]
        size = len(counts), max(counts)
        p = logits.new_zeros((*size, logits.shape[-1]))  # [B, N, V]
        uniform = torch.ones(size, dtype=torch.float64)  # [B, N]
        rows = zip(sequences, trees, logits.split(counts), counts, strict=True)
        for b, (sequence, tree, rows_of_tree, count) in enumerate(rows):
            try:
                p[b, :count] = sequence.sampler.probs(rows_of_tree, tree.path_tokens())
            except Exception as error:
                sequence.fault = error
                p[b, :count, 0] = 1  # any distribution: nothing that is drawn from it comes out
            places = [len(sequence.tokens) - 1 + depth for depth in depths[b]]
            uniform[b, :count] = sequence.sampler.accept_uniform(places, list(range(count)))

        def residual(b: int, node: int) -> Tensor:
            place = len(sequences[b].tokens) + depths[b][node]
            return sequences[b].sampler.residual_gumbel(place, p.device)

        return rule(trees, p, uniform.to(p.device), residual)

    return verifier


@dataclass(frozen=True, slots=True)
class VerifierKind:
    """A verifier and its requirements."""

    verify: Verifier | None = None  # None: the target's own choices are followed along the tree
    needs_q: bool = False  # weighs p against the q that the drafts were drawn from: ids depend on the drafter
    chains_only: bool = False


VERIFIERS: dict[str, VerifierKind] = {
    DEFAULT_VERIFIER: VerifierKind(),
    "rejection": VerifierKind(_against_q(verify.rejection), needs_q=True),
    "block": VerifierKind(_against_q(verify.block), needs_q=True, chains_only=True),
}


def make_verifier(name: str, spec: DrafterSpec | None) -> VerifierKind:
    """Return the verifier called ``name``, checked against what the drafter proposes.

    Raises:
        ConfigError: unknown name.
        CapabilityError: a verifier that needs q, or chains, with a drafter that does not give them.
    """
    if name not in VERIFIERS:
        names = ", ".join(VERIFIERS)
        raise ConfigError(f"verifier={name!r}", "there is no such verifier", f"use one of: {names}")
    kind = VERIFIERS[name]
    if kind.needs_q and (spec is None or spec.proposes != "sampled"):
        drafter = "no drafter" if spec is None else f"drafter {spec.name!r}, which proposes {spec.proposes} drafts"
        raise CapabilityError(
            f"verifier={name!r} with {drafter}",
            "it needs drafts that were drawn from a known distribution",
            f"use draft_model with proposes=sampled, or verifier={DEFAULT_VERIFIER!r}",
        )
    if kind.chains_only and spec is not None and spec.tree:
        raise CapabilityError(
            f"verifier={name!r} with drafter {spec.name!r}, which proposes trees",
            "this verification is defined on chains",
            "let the drafter propose a chain, or use verifier='rejection'",
        )
    return kind
