"""Statistics of speculation: counts, acceptance, times.

Definitions, once for the whole project:

- A *pass* is a forward of the target that chose at least one token of the sequence's output.
- *Drafted* tokens were checked by a pass; *accepted* ones are those of them that were emitted, after the stop rules'
  cut; *emitted* tokens are all tokens of the output.
- *Row-layers* are rows times the layers that each went through, of roots, drafted nodes and rows that draft in the pass
  (rows of a prompt before its last are left out); the *upper* ones are those of the layers that the latter go through.
- The mean accepted length is ``1 + accepted / passes``: tokens a pass if no stop rule cut any.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from itertools import zip_longest
from typing import Any


@dataclass(slots=True)
class SourceStats:
    """Describe what one proposer contributed."""

    drafted: int = 0
    accepted: int = 0
    accepted_at: list[int] = field(default_factory=list)  # [d - 1]: those of them at depth d

    def add(self, drafted: int, depths: Sequence[int]) -> None:
        """Count nodes of a pass; ``depths`` of the accepted ones, ascending."""
        self.drafted += drafted
        self.accepted += len(depths)
        if depths:
            self.accepted_at += [0] * (depths[-1] - len(self.accepted_at))
            for depth in depths:
                self.accepted_at[depth - 1] += 1


@dataclass(slots=True)
class SpecStats:
    """Counts and times (ms) of one sequence, one request or a whole run."""

    passes: int = 0
    drafted: int = 0
    accepted: int = 0
    emitted: int = 0
    accepted_histogram: list[int] = field(default_factory=list)  # [a]: passes that accepted exactly a drafted tokens
    depth_offered: list[int] = field(default_factory=list)  # [d - 1]: passes that accepted d - 1 and had a node at d
    depth_accepted: list[int] = field(default_factory=list)  # [d - 1]: those of them that accepted at depth d
    sources: dict[str, SourceStats] = field(default_factory=dict)  # by proposer
    draft_ms: float = 0.0
    verify_ms: float = 0.0  # target forwards and the choice of tokens
    host_ms: float = 0.0  # everything else that the engine does
    idle_ms: float = 0.0  # waiting for other work
    elapsed_ms: float = 0.0  # wall time, from submission to the last token
    queue_ms: float | None = None  # from submission to the first step that computed a part of the prompt
    ttft_ms: float | None = None  # from submission to the first token
    row_layers: int = 0  # of passes
    upper_row_layers: int = 0  # those in the layers that rows which draft go through; 0 where a pass has none
    stream_drafts: int = 0  # passes after which drafting rows of the last accepted node were read
    rode: int = 0  # those of them in which that node had such rows; else they ran afterwards
    pruned: int = 0  # proposed nodes that were pruned in mid-pass: neither drafted nor accepted
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0  # those whose K/V was found in the pool
    preemptions: int = 0
    off_reason: str | None = None  # why speculation is off, or was put aside on the way

    def record_plain(self) -> None:
        """`record_pass` of a pass that drafted nothing and emitted one token."""
        self.passes += 1
        self.emitted += 1
        if self.accepted_histogram:
            self.accepted_histogram[0] += 1
        else:
            self.accepted_histogram.append(1)

    def record_pass(
        self,
        *,
        drafted: int,
        accepted: int,
        emitted: int,
        offered: int | None = None,
        sources: Mapping[str, tuple[int, Sequence[int]]] | None = None,
    ) -> None:
        """Count one pass.

        Args:
            drafted: nodes checked, root not counted.
            accepted: drafted tokens that were emitted.
            emitted: tokens added to the output.
            offered: deepest level at which a node was proposed: one below the accepted path where its
                end has a child, else the length of the path. Default: as for a chain.
            sources: name -> (drafted, depths of the accepted ones), of each that proposed nodes of the tree.

        Raises:
            ValueError: counts that contradict each other.
        """
        reach = min(accepted + 1, drafted) if offered is None else offered
        if not 0 <= accepted <= drafted or emitted < accepted or not accepted <= reach <= accepted + 1:
            raise ValueError(f"a pass cannot have {drafted=}, {accepted=}, {emitted=}, offered={reach}")
        self.passes += 1
        self.drafted += drafted
        self.accepted += accepted
        self.emitted += emitted
        histogram, of_depth, kept_at = self.accepted_histogram, self.depth_offered, self.depth_accepted
        if len(histogram) <= accepted:
            histogram += [0] * (accepted + 1 - len(histogram))
        histogram[accepted] += 1
        if len(of_depth) < reach:
            of_depth += [0] * (reach - len(of_depth))
            kept_at += [0] * (reach - len(kept_at))
        for depth in range(reach):
            of_depth[depth] += 1
            kept_at[depth] += depth < accepted
        if sources:
            for name, (proposed, accepted_here) in sources.items():
                self.sources.setdefault(name, SourceStats()).add(proposed, accepted_here)

    @property
    def mean_accepted_length(self) -> float:
        """Return 1 + accepted / passes; 1 before the first pass."""
        return 1 + self.accepted / self.passes if self.passes else 1.0

    @property
    def acceptance_rate(self) -> float:
        """Return accepted over drafted; 0 where nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def depth_acceptance(self) -> list[float]:
        """Return [d - 1]: share accepted at depth d, of the passes that accepted d - 1 and had a node there."""
        return [a / o if o else 0.0 for a, o in zip(self.depth_accepted, self.depth_offered, strict=True)]

    @property
    def tokens_per_second(self) -> float:
        """Return emitted tokens over `elapsed_ms`; 0 before it is known."""
        return 1000 * self.emitted / self.elapsed_ms if self.elapsed_ms else 0.0

    def merge(self, other: SpecStats) -> SpecStats:
        """Return the sum of both, for requests that ran together.

        Counts and times add up. ``elapsed_ms`` is the longer one, ``ttft_ms`` and ``queue_ms`` the earlier ones.
        ``off_reason`` is kept if nothing at all was drafted.
        """
        merged = SpecStats(**{name: _sum(getattr(self, name), getattr(other, name)) for name in _SUMS})
        merged.elapsed_ms = max(self.elapsed_ms, other.elapsed_ms)
        for name in ("ttft_ms", "queue_ms"):
            times = [t for t in (getattr(self, name), getattr(other, name)) if t is not None]
            setattr(merged, name, min(times, default=None))
        if not merged.drafted:
            merged.off_reason = self.off_reason or other.off_reason
        return merged

    def as_dict(self) -> dict[str, Any]:
        """Return fields and derived figures, ready for JSON."""
        derived = ("mean_accepted_length", "acceptance_rate", "depth_acceptance", "tokens_per_second")
        return asdict(self) | {name: getattr(self, name) for name in derived}

    def headline(self, samples: int = 1) -> str:
        """Return speed, tokens a pass and the prompt's time: ``84 tokens/s, 1.95 tokens a pass, prompt 36 in 0.1 s``.

        The speed leaves out the prompt: it is that of the tokens after the first one of each sample, from then on.
        """
        parts = [f"{self.emitted} token{'s' * (self.emitted != 1)}"]
        if self.ttft_ms is not None:
            seconds = (self.elapsed_ms - self.ttft_ms) / 1e3
            if self.emitted > samples and seconds > 0:
                rate = (self.emitted - samples) / seconds
                parts = [
                    f"{rate:.{0 if rate >= 10 else 1}f} tokens/s",
                    f"{self.emitted / self.passes:.2f} tokens a pass",
                ]
            prompt = self.ttft_ms - (self.queue_ms or 0.0)
            took = f"{prompt / 1e3:.1f} s" if prompt >= 100 else f"{prompt:.0f} ms"
            parts.append(f"prompt {self.prompt_tokens} in {took}")
        return ", ".join(parts)

    def summary(self, samples: int = 1) -> str:
        """Return the main figures in one line of text: `headline`, counts, times, and why speculation is off."""
        parts = [
            self.headline(samples),
            f"mean accepted length {self.mean_accepted_length:.2f}",
            f"{self.passes} target passes for {self.emitted} tokens",
            f"draft {self.draft_ms:.0f} ms, verify {self.verify_ms:.0f} ms, host {self.host_ms:.0f} ms",
        ]
        if self.idle_ms:
            parts[-1] += f", idle {self.idle_ms:.0f} ms"
        if self.off_reason:
            parts.append(f"speculation off: {self.off_reason}")
        return " | ".join(parts)


def _sum(a: Any, b: Any) -> Any:
    """Return the sum of two counts, or of the counts in two lists, dictionaries or records."""
    if isinstance(a, list):
        return [x + y for x, y in zip_longest(a, b, fillvalue=0)]
    if isinstance(a, dict):
        return {key: _sum(a.get(key, SourceStats()), b.get(key, SourceStats())) for key in a | b}
    if isinstance(a, SourceStats):
        return SourceStats(*(_sum(getattr(a, f.name), getattr(b, f.name)) for f in fields(a)))
    return a + b


_SUMS = tuple(f.name for f in fields(SpecStats) if f.name not in ("elapsed_ms", "queue_ms", "ttft_ms", "off_reason"))
