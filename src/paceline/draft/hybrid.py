"""Several drafters as one: their nodes are merged into one tree, under one budget.

Drafters are called in the order given, cheapest first. A look-up costs next to nothing and has long accepted runs where
an answer copies from its prompt or from itself; a draft model is accepted more often elsewhere, at the cost of its
passes. So each is called only for sequences where what it adds to the drafts on hand pays for its time: the rule of
`engine.auto` states where, and which of the merged nodes are checked. With a fixed budget there are no prices; then a
drafter is called unless those before it are nearly sure of the next token.

A drafter in the target's pass is called a step ahead: rows of the coming pass draft for the sequences that it
is called for, and their drafts are merged in the step after it, with those of the others.
"""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass, replace
from functools import cached_property
from math import exp, log
from time import perf_counter
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from ..core.errors import CapabilityError, ConfigError
from ..core.sequence import Sequence
from ..core.tree import TokenTree
from .base import Drafter, DrafterSpec, DraftRequest, StepFeatures
from .none import NoneConfig
from .registry import DrafterConfig, DrafterContext, build, config_class, names, option, parse
from .sessions import DraftSessions
from .text_sessions import LookUp, LookUps, TextSessions

if TYPE_CHECKING:
    from ..model.decoder import TargetInfo

LOOKUP = "suffix,depth=14,max_tokens=0"  # next to a model that is named alone
MODEL = "draft_model:{},depth=8"
SURE = 0.8  # with a fixed budget: chance of the next token from which no other drafter is called
UNSURE = 0.3  # with a fixed budget: chance of a path below which a network goes no further


@dataclass(frozen=True, kw_only=True)
class HybridConfig(DrafterConfig):
    """Several drafters merged under one budget: look-ups where the text repeats itself, a draft model elsewhere."""

    kind: ClassVar[str] = "hybrid"
    subject: ClassVar[str] = "parts"
    nests: ClassVar[bool] = True

    parts: str = option(
        help="drafters joined by +, cheapest first, their options after ;: suffix;depth=8+draft_model:NAME;topk=2. "
        "A model's name alone: a suffix look-up is added"
    )
    nodes: int = option(24, help="most nodes of a merged draft", minimum=1, maximum=1024)
    dtype: str = option(
        "auto", help="dtype of draft models that name none: auto (the target's), bfloat16, float32, int8 .."
    )

    def validate(self) -> None:
        """Refuse parts that are not drafters, or cannot be merged."""
        for chosen in self.chosen:
            self.require("parts", chosen.kind != self.kind, "cannot be hybrids themselves")

    @cached_property
    def chosen(self) -> tuple[DrafterConfig, ...]:
        """The drafters' configurations."""
        texts = [text.strip().replace(";", ",") for text in self.parts.split("+")]
        self.require("parts", all(texts), "names an empty drafter")
        drafters = {*names()}
        if len(texts) == 1 and _name(texts[0]) not in drafters:
            texts = [LOOKUP, MODEL.format(texts[0])]
        return tuple(self._read(text if _name(text) in drafters else f"draft_model:{text}") for text in texts)

    def with_weights(self, find: abc.Callable[[str], str], applied: bool = False) -> HybridConfig:
        """Return the same, each part with the weights that it means; see `DrafterConfig`."""
        texts = self.parts.split("+")
        if len(texts) != len(self.chosen):  # a model's name alone
            return self
        for place, part in enumerate(self.chosen):
            full = part.with_weights(find, applied)
            if full != part:
                head, semicolon, rest = texts[place].partition(";")
                texts[place] = f"{head.strip()}:{getattr(full, full.weights)}{semicolon}{rest}"
        return replace(self, parts="+".join(texts))

    def _read(self, text: str) -> DrafterConfig:
        has_model = "dtype" in config_class(_name(text)).__dataclass_fields__
        if has_model and self.dtype != "auto" and ",dtype=" not in text:
            text += f",dtype={self.dtype}"
        chosen = parse(text)
        assert chosen is not None, "a text was given"
        return chosen

    @property
    def model(self) -> str | None:
        """The first draft model among the drafters."""
        return next((chosen.model for chosen in self.chosen if hasattr(chosen, "model")), None)

    def build(self, context: DrafterContext) -> Hybrid:
        """Build every drafter."""
        return Hybrid(self, [build(chosen, context) for chosen in self.chosen])


def _name(text: str) -> str:
    return text.partition(",")[0].partition(":")[0].strip()


def with_parts(parts: abc.Sequence[str], drafter: str) -> str:
    """Return a drafter's name with others called before it; of one that drafts nothing the others alone."""
    kind, _, rest = drafter.partition(":")
    if kind == NoneConfig.kind:
        return f"hybrid:{'+'.join(parts)}"
    if kind != HybridConfig.kind:
        return f"hybrid:{'+'.join([*parts, drafter.replace(',', ';')])}"
    model_part, comma, options = rest.partition(",")
    if "+" not in model_part and _name(model_part) not in {*names()}:  # a model's name alone: see `HybridConfig.parts`
        model_part = f"{LOOKUP}+{MODEL.format(model_part)}".replace(",", ";")
    return f"hybrid:{'+'.join([*parts, model_part])}{comma}{options}"


class Hybrid(Drafter):
    """Calls several drafters and merges their proposals.

    Args:
        config: options.
        parts: the drafters, cheapest first.

    Raises:
        CapabilityError: one of them cannot be merged.
    """

    trusted = True

    def __init__(self, config: HybridConfig, parts: abc.Sequence[Drafter]) -> None:
        for part in parts:
            _check(config, part.spec)
        self.config, self.parts = config, [*parts]
        specs = [part.spec for part in parts]
        pasts, labels = [spec.past for spec in specs], [spec.name for spec in specs]
        ahead = [source for source, s in enumerate(specs) if s.in_pass]
        if len(ahead) > 1:
            raise CapabilityError(f"hybrid:{config.parts}", "two draft in the target's pass", "name one of these")
        self._ahead = ahead[0] if ahead else -1  # the source that is called a step ahead
        self._networks = [part for part in parts if not isinstance(part, LookUp)]
        self._target: TargetInfo | None = None
        self.spec = DrafterSpec(
            name=config.kind,
            taps=tuple(sorted({tap for spec in specs for tap in spec.taps})),
            past=None if None in pasts else max(past for past in pasts if past is not None),
            network=any(spec.network for spec in specs),
            cached=any(spec.cached for spec in specs),
            proposes="coupled" if any(spec.proposes == "coupled" for spec in specs) else "point",
            in_pass=bool(ahead),
            scratch=max(spec.scratch for spec in specs),
            default_budget=config.nodes,
            tree=True,
            ahead=self._levels() > 0,
            ahead_levels=self._levels(),
            # A repeated name has a number.
            sources=tuple(
                n if n not in labels[:i] else f"{n} {labels[: i + 1].count(n)}" for i, n in enumerate(labels)
            ),
            parts=tuple(specs),
        )

    def bind(self, target: TargetInfo, max_sequences: int, pool_tokens: int, device: torch.device) -> None:
        """Bind every drafter."""
        self._target = target
        for part in self.parts:
            part.bind(target, max_sequences, pool_tokens, device)

    def _levels(self) -> int:
        """Return tokens of a chain that its sessions draft; 0: it has none, for want of a single network with them."""
        if len(self._networks) > 1 or not all(part.spec.ahead for part in self._networks):
            return 0
        return max(part.spec.window for part in self._networks or self.parts)

    def sessions(self, rows: int) -> DraftSessions:
        """Implement `Drafter`: look-ups are called first, and the network where none is nearly sure."""
        assert self._target is not None and self.spec.ahead, "bind comes first; see `DrafterSpec.ahead`"
        look_ups = LookUps({k: part for k, part in enumerate(self.parts) if isinstance(part, LookUp)}, log(SURE))
        for part in self._networks:
            part_sessions: Any = part.sessions(rows)
            part_sessions.look_ups, part_sessions.source = look_ups, self.parts.index(part)
            return part_sessions
        return TextSessions(look_ups, self._target.vocab_size, self._target.eos_ids)

    def observe(self, step: StepFeatures) -> None:
        """Show every drafter the step."""
        for part in self.parts:
            part.observe(step)

    def release(self, keys: abc.Sequence[int]) -> None:
        """Drop the state of ended or preempted sequences."""
        for part in self.parts:
            part.release(keys)

    def forget(self) -> None:
        """Forget what is kept from one request to the next."""
        for part in self.parts:
            part.forget()

    def idle_reason(self, view: Sequence) -> str | None:
        """Implement `Drafter`: those of all, where each has one."""
        reasons = [part.idle_reason(view) for part in self.parts]
        return None if None in reasons else "; ".join(map(str, reasons))

    def scratch_slots(self, rows: int, sequences: int) -> int:
        """Implement `Drafter`."""
        return max(part.scratch_slots(rows, sequences) for part in self.parts)

    def draft(self, want: DraftRequest) -> list[TokenTree]:
        """One tree a sequence; a node's source is the drafter that proposed it first."""
        drafts = [TokenTree() for _ in want.sequences]
        first = [0.0 for _ in drafts]  # chance that each draft begins right
        for source in range(len(self.parts)):
            began = perf_counter()
            requested = self._asked(source, want, first)
            if source == self._ahead:
                ahead = {*requested}
                self.parts[source].expect({view.key: i in ahead for i, view in enumerate(want.sequences)})
            if not requested:
                continue
            passes = self._add(source, want, requested, drafts, first)
            if want.rule is not None:
                want.rule.record_cost(source, passes, (perf_counter() - began) * 1e3)
        return [draft.best(min(budget, self.config.nodes)) for draft, budget in zip(drafts, want.budgets, strict=True)]

    def _asked(self, source: int, want: DraftRequest, first: abc.Sequence[float]) -> list[int]:
        """Return the sequences to call a drafter for."""
        if want.rule is not None:
            return want.rule.ask(source, want.sequences, first)
        open_ = [i for i, view in enumerate(want.sequences) if view.sources is None or source in view.sources]
        if source == self._ahead:  # of the next step nothing is known
            return open_
        return [i for i in open_ if first[i] < SURE]

    def _add(
        self,
        source: int,
        want: DraftRequest,
        requested: abc.Sequence[int],
        drafts: abc.Sequence[TokenTree],
        first: list[float],
    ) -> int:
        """Call one drafter, and merge its proposals. Returns the passes that it took."""
        part, rule = self.parts[source], want.rule
        request = DraftRequest(
            sequences=[want.sequences[i] for i in requested],
            budgets=[min(want.budgets[i], part.spec.default_budget) for i in requested],
            max_depths=[want.max_depths[i] for i in requested],
            floor=UNSURE if rule is None else rule.level_chance(source, len(requested)),
            caches=[want.caches[i] for i in requested] if want.caches else (),
        )
        proposals = part.draft(request)
        for i, draft in zip(requested, proposals, strict=True):
            if not draft.tokens:
                continue
            if source + 1 < len(self.parts):  # whom a later one is called for depends on it
                begins = [score for score, parent in zip(draft.scores, draft.parents, strict=True) if not parent]
                chance = sum(map(exp, begins)) if rule is None else rule.first(source, want.sequences[i], begins)
                first[i] = max(first[i], chance)
            drafts[i].graft(draft, source)
        return max(draft.depth for draft in proposals) if request.passes is None else request.passes


def _check(config: HybridConfig, spec: DrafterSpec) -> None:
    """Refuse a drafter whose drafts cannot be merged with others'."""
    subject, remedy = f"hybrid:{config.parts}", "leave it out, or run it alone"
    if spec.proposes == "sampled":
        raise CapabilityError(subject, f"{spec.name} draws its drafts, which cannot be ranked or left out", remedy)
    if spec.default_budget == 0:
        raise ConfigError(subject, f"{spec.name} drafts nothing", remedy)
