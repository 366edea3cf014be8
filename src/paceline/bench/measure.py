"""One method on one group of prompts: the engine is stepped from here, so that every arrival has a time.

submit as many as run at once -> step, note who got how many tokens when; as one ends, the next begins -> `Trial`
"""

from __future__ import annotations

import gc
import logging
import zlib
from collections import abc
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import reduce
from time import perf_counter
from typing import Any

from ..api.config import TARGET_OPTIONS, LLMConfig
from ..api.llm import LLM
from ..core.sampling import SamplingParams
from ..core.sequence import Sequence
from ..core.stats import SpecStats
from ..kv.pool import KVPool
from ..model.decoder import Decoder
from ..weights.names import weight_map
from .arrivals import Arrivals
from .methods import drafter_of
from .records import Cell, Method, PromptIds, Trial

log = logging.getLogger(__name__)

SPARE_TOKENS = 64  # slots a sequence in addition to prompt and answer: drafts, rounding to blocks, a block of headroom

# What a trial takes from the engine's own statistics.
COUNTED = (
    *("passes", "drafted", "accepted", "depth_offered", "depth_accepted"),
    *("row_layers", "upper_row_layers", "pruned", "stream_drafts", "rode", "draft_ms", "verify_ms", "host_ms"),
)


@dataclass(frozen=True, kw_only=True)
class Group:
    """Prompts of one trial, of which the cell's batch run at once."""

    cell: Cell
    index: int
    prompts: tuple[PromptIds, ...]
    seed: int  # of the whole run

    @property
    def lengths(self) -> list[int]:
        """Return the most tokens of prompt and answer of requests that run at once."""
        return sorted((len(p.ids) + self.cell.max_new_tokens for p in self.prompts), reverse=True)[: self.cell.batch]

    def params(self, prompt: PromptIds, max_new_tokens: int | None = None) -> SamplingParams:
        """Return the sampling of a prompt: the same for every method and repeat."""
        return SamplingParams(
            temperature=self.cell.temperature,
            top_k=self.cell.top_k,
            max_tokens=max_new_tokens or self.cell.max_new_tokens,
            ignore_eos=self.cell.ignore_eos,
            seed=zlib.crc32(f"{self.seed}/{prompt.id}".encode()),
        )

    def blank(self, method: str, repeat: int) -> Trial:
        """Return a trial in which nothing has happened yet."""
        return Trial(
            method=method,
            cell=self.cell,
            group=self.index,
            repeat=repeat,
            prompts=[p.id for p in self.prompts],
            prompt_tokens=[len(p.ids) for p in self.prompts],
        )


def kv_bytes(decoder: Decoder, tokens: int) -> int:
    """Return the bytes of K and V that one row's attention reads over ``tokens`` committed tokens, all layers."""
    _, heads, width = decoder.cache_shape
    keys = sum(tokens if window is None else min(tokens, window) for window in decoder.config.windows)
    return 2 * keys * heads * width * decoder.dtype.itemsize


def forget(llm: LLM, group: Group) -> None:
    """Drop the caches, so that the next trial reuses nothing of an earlier one."""
    llm.forget()


@dataclass(frozen=True)
class EngineRunner:
    """A method of this engine, and the engine that was made for it; target weights may be shared with others."""

    method: Method
    llm: LLM
    begin: Callable[[LLM, Group], None] = forget  # called before each trial, off the clock

    def warm_up(self, group: Group, max_new_tokens: int) -> None:
        """Run a group without counting it, which does one-time work.

        Raises:
            Exception: whatever the engine raises.
        """
        self._drive(group, group.blank(self.method.name, 0), max_new_tokens)

    def run(self, group: Group, repeat: int) -> Trial:
        """Run one trial; an error of the engine becomes the trial's."""
        trial, engine = group.blank(self.method.name, repeat), self.llm.engine
        gc.collect()
        gc.disable()
        try:
            self._drive(group, trial)
        except BaseException as error:
            for request_id in list(engine.live):
                engine.abort(request_id)
            if not isinstance(error, Exception):
                raise
            log.warning("%s failed on group %d of %s", self.method.name, group.index, group.cell, exc_info=error)
            return replace(group.blank(self.method.name, repeat), error=f"{type(error).__name__}: {error}")
        finally:
            gc.enable()
        trial.off_reason = engine.round.failure or (None if self.method.plain else trial.off_reason)
        return trial

    def _drive(self, group: Group, trial: Trial, max_new_tokens: int | None = None) -> None:
        """Submit a group, step until all are answered, and fill in the trial."""
        engine, decoder, application = self.llm.engine, self.llm.decoder, self.method.application
        self.begin(self.llm, group)
        began = perf_counter()
        pending = [(prompt.ids, group.params(prompt, max_new_tokens)) for prompt in group.prompts]
        places: dict[str, int] = {}
        sequences: list[Sequence] = []
        seen, begun = Arrivals(len(pending)), []
        while len(sequences) < len(pending) or engine.busy:
            for ids, params in pending[len(sequences) :][: group.cell.batch - len(engine.live)]:
                begun.append(1000 * (perf_counter() - began))
                name = engine.submit(ids, params, application=application)
                places[name] = len(sequences)
                sequences += engine.live[name].sequences
            # The pass must read everything committed before it; what it writes itself is in the caches.
            held = [s.cache.committed for s in engine.scheduler.running if s.cache is not None]
            trial.bytes_read += decoder.pass_bytes + sum(kv_bytes(decoder, tokens) for tokens in held)
            touched = engine.step()
            now_ms = 1000 * (perf_counter() - began)
            for place in (places[live.id] for live in touched):
                seen.note(place, len(sequences[place].output_ids), now_ms)
            trial.steps += 1
        stats = reduce(SpecStats.merge, (sequence.stats for sequence in sequences))
        trial.outputs = [list(sequence.output_ids) for sequence in sequences]
        trial.finish = [str(sequence.checker.finish_reason) for sequence in sequences]
        trial.ttft_ms = [first - start for first, start in zip(seen.first_ms, begun, strict=True) if first]
        trial.wall_ms, trial.off_reason = max(filter(None, seen.last_ms)), stats.off_reason
        trial.waits_ms, trial.arrivals = seen.waits_ms, seen.arrivals
        for name in COUNTED:
            setattr(trial, name, getattr(stats, name))


# -- building them


class Builder:
    """Makes the engines of a run. Methods whose target is the same share its weights.

    Args:
        applications: folders of the trained sets that methods name.
    """

    def __init__(
        self, model: str, device: str, threads: int | None, applications: Mapping[str, str] | None = None
    ) -> None:
        self._applications = dict(applications or {})
        self._common: dict[str, Any] = {"model": model, "device": device, "threads": threads}
        self._targets: list[LLM] = []

    def llm(self, method: Method, lengths: abc.Sequence[abc.Sequence[int]] = ()) -> LLM:
        """Return a method's engine.

        Args:
            lengths: tokens of prompt and answer of all sequences that run at once, for each such group: there is room
                for the largest. Empty: as `LLM` has it.

        Raises:
            ConfigError: the method and the model do not fit together.
        """
        options = {**self._common, "drafter": drafter_of(method), "round": method.round, "dtype": method.dtype}
        # No engine holds sets that it does not run.
        options["applications"] = {name: self._applications[name]} if (name := method.application) else None
        options |= method.settings
        target = self._target(options)
        if lengths:
            longest, room = max(map(max, lengths)), max(sum(each) + len(each) * SPARE_TOKENS for each in lengths)
            options["max_sequences"] = max(map(len, lengths))
            options["max_model_len"] = min(longest, target.decoder.config.max_position)
            per_token = KVPool.bytes_per_token(*target.decoder.cache_shape, target.decoder.dtype)
            options["kv_memory"] = per_token * max(room, longest + 1)
        return LLM(**options, share=target)

    def _target(self, options: dict[str, Any]) -> LLM:
        """Return the target for these options, loaded where it is not in memory yet."""
        target_options = {name: options[name] for name in TARGET_OPTIONS if name in options}
        config = LLMConfig(**target_options)
        for llm in self._targets:
            if all(getattr(llm.config, name) == getattr(config, name) for name in TARGET_OPTIONS):
                return llm
        # A bare one, whose K/V pool stays untouched: it is there for its weights.
        self._targets.append(LLM(**target_options, threads=options["threads"], max_sequences=1))
        return self._targets[-1]


def model_facts(llm: LLM, name: str) -> dict[str, Any]:
    """Return the facts about the target in a report."""
    decoder, shape = llm.decoder, llm.decoder.config
    names = ("family", "d_model", "vocab_size", "max_position")
    return {
        "name": name,
        **{name: getattr(shape, name) for name in names},
        "parameters": sum(piece.numel for piece in weight_map(shape)),
        "dtype": str(decoder.dtype).removeprefix("torch."),
        "kernels": llm.kernels,
        "layers": shape.num_layers,
        "pass_bytes": decoder.pass_bytes,
        "kv_bytes_per_token": kv_bytes(decoder, 1),
    }
