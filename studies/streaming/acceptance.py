"""The paper's acceptance rule against exact sampling (eq. 9, appendix F): speed, and the distance to p."""

from __future__ import annotations

from collections import abc
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from kit.grid import ALL, GridLine, how, lines_of
from kit.scores import encoded_prompts, workload_of
from kit.study import Entry, Table, measure
from torch import Tensor

from paceline.api.llm import LLM
from paceline.bench import report as say
from paceline.bench import workloads
from paceline.bench.records import Method
from paceline.core.sampling import SamplingParams
from paceline.core.sequence import Sequence
from paceline.core.tree import TokenTree
from paceline.core.verify import Accepted, lossy_stream_rejection, walk
from streaming.common import CUT, StreamingFlags, TrainedSet, grid_of, study

LOSSY = "lossy_stream_rejection"
DRAWS = 2048  # of the rule, on every tree
REST = 0  # stands for all tokens that are not in the tree
REMARKS = (
    "distance to p: total variation between the next token's distribution under the rule, given text and draft, and "
    "the target's own; a mean over tokens that came out of checked drafts",
    f"estimated from {DRAWS} draws of the rule on every tree that it met; what an exact rule shows there is noise",
    "a rule of eq. 9 draws anew for every draft, so its ids differ from plain decoding's; on drawn chains it is exact "
    "by proof (Chen et al. 2023) and tested in tests/lossless/test_distribution.py",
)


@study.table(needs=("set",), prompts=6, repeats=1)
def equation_9(ask: StreamingFlags) -> Iterator[Table | None]:
    """The lossy rule on likeliest tokens beside exact sampling, temperature 1: speed, tokens a pass, distance to p."""
    trained = TrainedSet.read(str(ask.set))
    tree: dict[str, Any] = {"k": 3, "nodes": CUT}
    exact = [
        trained.method("exact: tree, the target's own noise", **tree),
        trained.method("exact: tree of the likeliest tokens", proposes="point", **tree),
        trained.method("exact: eq. 9 on a drawn chain", proposes="sampled", verifier="rejection"),
    ]
    lossy = [
        trained.method("lossy: eq. 9 on the likeliest chain", proposes="point", verifier=LOSSY, chain=True),
        trained.method("lossy: eq. 9 on a tree of the likeliest", proposes="point", verifier=LOSSY, **tree),
    ]
    entries = [*(Entry(m, "exact") for m in exact), *(Entry(m, "lossy") for m in lossy)]
    grid = grid_of([trained], "acceptance rules", entries, cells={"temperatures": (1.0,)})
    grid.config(ask)
    yield None
    report = measure(grid, ask, ask.out / "equation_9")
    found = {method.name: distances_of(ask, trained, method) for method in lossy}
    yield Table(
        title="The lossy rule of eq. 9 beside exact sampling, temperature 1",
        head=("task", "rule", "speed-up", "tokens a pass", "distance to p", "of an exact rule", "ids equal plain"),
        parts={"": [[line.task, line.method, *_cells(line, found)] for line in lines_of(grid, report)]},
        values={
            "lines": [asdict(line) for line in lines_of(grid, report)],
            "distance": {
                name: {task: {"lossy": asdict(d.lossy), "exact": asdict(d.exact)} for task, d in of_tasks.items()}
                for name, of_tasks in found.items()
            },
        },
        remarks=REMARKS,
        how=how(report, grid.facts),
        same=all(one.passed for one in report.exactness),
    )


def _cells(line: GridLine, found: Mapping[str, Mapping[str, Distance]]) -> list[str]:
    distance = found.get(line.method, {}).get(line.task)
    told = [say.NOTHING] * 2 if distance is None else [f"{distance.lossy.value:.3f}", f"{distance.exact.value:.3f}"]
    if line.series == "exact":
        told = ["0", say.NOTHING]
    return [line.bracketed, say.length(line.call_reduction), *told, line.exact]


# -- the distance


@dataclass(slots=True)
class TokenMean:
    """Of what each of many tokens says."""

    total: float = 0.0
    tokens: float = 0.0

    @property
    def value(self) -> float:
        """0 where there is no token."""
        return self.total / self.tokens if self.tokens else 0.0

    def __add__(self, other: TokenMean) -> TokenMean:
        return TokenMean(self.total + other.total, self.tokens + other.tokens)


@dataclass(slots=True)
class Distance:
    """Total variation between what a rule does and p, weighted by how often it comes to each place of a draft."""

    draws: int = DRAWS
    noise: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(0))
    lossy: TokenMean = field(default_factory=TokenMean)  # eq. 9 on trees of likeliest tokens
    exact: TokenMean = field(
        default_factory=TokenMean
    )  # sample and match on the same trees, estimated in the same way: noise

    def add(
        self, tokens: abc.Sequence[int], parents: abc.Sequence[int], scores: abc.Sequence[float], p: Tensor
    ) -> None:
        """One tree.

        Args:
            tokens, parents, scores: [N] of its nodes, the root first; scores are cumulative log q.
            p: [N, V] the target's distribution after each node.
        """
        known, few = condensed(tokens, p)
        tree = TokenTree([*known[1:]], [*parents[1:]], [*scores[1:]])
        trees = [tree] * self.draws
        many = few.expand(self.draws, -1, -1)
        uniform = torch.rand(many.shape[:2], generator=self.noise, dtype=torch.float64)
        noise = -torch.empty(self.draws, few.shape[1], dtype=few.dtype).exponential_(generator=self.noise).log()
        lossy = lossy_stream_rejection(trees, many, uniform, lambda b, node: noise[b])
        chosen = torch.multinomial(few, self.draws, replacement=True, generator=self.noise).T.tolist()
        for mean, verdicts in ((self.lossy, lossy), (self.exact, [*map(walk, trees, chosen)])):
            weight, distance = variation(known, parents, few, verdicts)
            mean.total += weight * distance
            mean.tokens += weight


def condensed(tokens: abc.Sequence[int], p: Tensor) -> tuple[list[int], Tensor]:
    """Nodes' tokens as few numbers, `REST` for the root's, and p [N, numbers] float64 over these.

    A rule does not tell tokens apart that are not in the tree: they stay as likely beside each other as they were, so
    distances are the same.
    """
    drafted = sorted({*tokens[1:]})
    place = {token: number for number, token in enumerate(drafted, start=1)}
    own = p[:, drafted].double()
    whole = torch.cat(((1.0 - own.sum(1, keepdim=True)).clamp(min=0.0), own), 1)
    return [REST, *(place[token] for token in tokens[1:])], whole / whole.sum(1, keepdim=True)


def variation(
    tokens: abc.Sequence[int], parents: abc.Sequence[int], p: Tensor, verdicts: abc.Sequence[Accepted]
) -> tuple[float, float]:
    """Tokens a draw, and the mean total variation of the token after each node that a draw comes to.

    Args:
        tokens, parents: [N] of a condensed tree.
        p: [N, numbers] after each node.
        verdicts: of many draws over it.
    """
    counts = torch.zeros_like(p)  # how often each token came after each node
    for path, last in verdicts:
        for above, token in zip([0, *path], [*(tokens[node] for node in path), last], strict=True):
            counts[above, token] += 1
    total = 0.0
    for node in range(len(tokens)):
        visits = float(counts[node].sum())
        children = sorted({tokens[child] for child, parent in enumerate(parents) if parent == node})
        if visits and children:  # after a leaf the token is p's own
            cells = (counts[node, children] / visits - p[node, children]).tolist()
            total += visits * 0.5 * (sum(map(abs, cells)) + abs(sum(cells)))  # all other tokens are one more cell
    weight = float(counts.sum())
    return weight / len(verdicts), total / weight


def distances_of(ask: StreamingFlags, trained: TrainedSet, method: Method) -> dict[str, Distance]:
    """What a lossy method does on the prompts of every task, and on `ALL`: its verdicts are watched as it answers."""
    found: dict[str, Distance] = {}
    applications = {trained.application: trained.folder} if trained.application else {}
    llm = LLM(ask.model, drafter=method.drafter, applications=applications, **method.settings, **ask.llm)
    guard = llm.engine.round.guard  # type: ignore[attr-defined]
    verify = guard.verifier.verify

    def watched(sequences: abc.Sequence[Sequence], trees: abc.Sequence[TokenTree], logits: Tensor) -> list[Accepted]:
        rows = logits.split([1 + len(tree) for tree in trees])
        for sequence, tree, own in zip(sequences, trees, rows, strict=True):
            if len(tree):
                p = sequence.sampler.probs(own, tree.path_tokens())
                found[task].add([-1, *tree.tokens], [-1, *tree.parents], [0.0, *tree.scores], p)
        return verify(sequences, trees, logits)

    guard.verifier = replace(guard.verifier, verify=watched)
    params = SamplingParams(temperature=1.0, seed=ask.seed, max_tokens=ask.max_new_tokens or 64)
    for task in map(workload_of, ask.names):
        found[task] = Distance()
        workload = workloads.load(task, folder=ask.data, limit=ask.prompts, seed=ask.seed)
        given = [{"prompt_token_ids": ids} for ids in encoded_prompts(llm, workload, params.max_tokens)[0]]
        llm.generate(given, params, application=trained.application)
    parts = found.values()
    whole = (sum((getattr(part, name) for part in parts), start=TokenMean()) for name in ("lossy", "exact"))
    return {**found, ALL: Distance(DRAWS, torch.Generator(), *whole)}
