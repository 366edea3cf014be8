"""Speculation within transformers' own ``generate``: chains of our look-ups, checked over its own cache.

    from paceline.bridges.transformers import generate
    model.generate(**inputs, custom_generate=generate, drafter="suffix", max_new_tokens=200)

Each token is the one that ``generate`` would have chosen: logits processors, the choice (argmax, or a draw from torch's
generator) and stopping criteria are applied token by token, in its order. So greedy and sampled ids are its own, up to
the rounding of passes over several rows: where two tokens are all but tied, and in low precision, they may differ.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation import GenerateDecoderOnlyOutput, GenerationMode

from ..core.errors import CapabilityError
from ..draft.base import Drafter
from ..draft.registry import DrafterConfig
from .tokens import TokenDrafter

ASKED = "model.generate with custom_generate=paceline.bridges.transformers.generate"
_MODES = {GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE}
_KEY = 0  # of the one sequence


def generate(
    model: Any,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    streamer: Any = None,
    drafter: str | DrafterConfig | Drafter | TokenDrafter = "suffix",
    prediction: Sequence[int] = (),
    **model_kwargs: Any,
) -> Any:
    """Generate in place of transformers' own search; ``generate`` calls it.

    Args:
        model, input_ids, logits_processor, stopping_criteria, generation_config, model_kwargs: as its own searches get
            them.
        streamer: receives every token.
        drafter: the drafter; a `TokenDrafter` remembers earlier answers, where its drafter does (suffix).
        prediction: tokens that the answer is likely to repeat, for the drafter ``prediction``.

    Returns:
        [1, prompt and output] ids, or transformers' output object with ``return_dict_in_generate``.

    Raises:
        CapabilityError: a batch, beams, or a model, a cache or an output that chains cannot serve.
    """
    caller = sys._getframe(1).f_locals  # transformers keeps its streamer from callables; the call's own is taken there
    streamer = caller.get("streamer") if streamer is None else streamer
    if caller.get("assistant_model") is not None:
        raise CapabilityError(ASKED, "assistant_model is another way to draft", "leave it or custom_generate out")
    _check(model, input_ids, generation_config, model_kwargs)
    drafts = drafter if isinstance(drafter, TokenDrafter) else TokenDrafter(drafter)
    text = model.config.get_text_config()
    eos = generation_config.eos_token_id
    eos_ids = [] if eos is None else [eos] if isinstance(eos, int) else list(eos)
    drafts.bind(text.vocab_size, eos_ids, getattr(text, "max_position_embeddings", None) or 1 << 20)
    search = _Search(model, input_ids, logits_processor, stopping_criteria, generation_config, streamer, model_kwargs)
    drafts.open(_KEY, input_ids[0].tolist(), input_ids.shape[1], generation_config.max_length, prediction)
    try:
        search.run(drafts)
    finally:
        drafts.close(_KEY)
        if streamer is not None:
            streamer.end()
    return search.result()


def _check(model: Any, input_ids: Tensor, config: GenerationConfig, kwargs: dict[str, Any]) -> None:
    """Refuse what chains cannot serve."""
    mode = config.get_generation_mode()
    cache = kwargs.get("past_key_values")
    reasons = {
        f"the mode {mode.value}": (mode not in _MODES, "use greedy search or sampling"),
        "more than one sequence at once": (input_ids.shape[0] > 1, "call it once a prompt, or use paceline.LLM"),
        "an encoder": (model.config.is_encoder_decoder, "use a decoder-only model"),
        "states that cannot be taken back": (getattr(model, "_is_stateful", False), "use a model with a K/V cache"),
        "use_cache=False": (not kwargs.get("use_cache"), "leave use_cache out"),
        f"a {type(cache).__name__}": (cache is None or not hasattr(cache, "crop"), "use a DynamicCache, the default"),
        "a static cache": (getattr(cache, "is_compileable", False), "use a DynamicCache, the default"),
        "attentions": (config.output_attentions, "leave output_attentions out"),
        "hidden states": (config.output_hidden_states, "leave output_hidden_states out"),
    }
    for wrong, (found, remedy) in reasons.items():
        if found:
            raise CapabilityError(ASKED, f"it does not serve {wrong}", remedy)


@dataclass
class _Search:
    """One generation: ids, the model's arguments and what is returned in addition to ids."""

    model: Any
    ids: Tensor  # [1, tokens so far]
    processors: Any  # LogitsProcessorList, which is declared to take a LongTensor
    stopping: StoppingCriteriaList
    config: GenerationConfig
    streamer: Any
    kwargs: dict[str, Any]
    scores: list[Tensor] = field(default_factory=list)  # [1, V] of each token, where they are requested
    logits: list[Tensor] = field(default_factory=list)

    def run(self, drafts: TokenDrafter) -> None:
        """Run until a stopping criterion is met."""
        outputs = self.model._prefill(self.ids, self.config, self.kwargs, is_first_iteration=True)
        cache = outputs.past_key_values
        cache.activate_past_recording()  # windows keep what a crop brings back
        said, ended = self._take(outputs, [])
        while not ended:
            drafts.extend(_KEY, said, len(said) - 1)
            room = self.config.max_length - self.ids.shape[1] - 1
            draft = drafts.chains({_KEY: max(0, room)})[_KEY]
            outputs = self._forward(draft)
            said, ended = self._take(outputs, draft)
            cache.crop(len(said) - 1 - len(draft))
        drafts.extend(_KEY, said, len(said) - 1)

    def _forward(self, draft: list[int]) -> Any:
        """Run one pass over the last token and the draft."""
        ids, kwargs = self.ids, self.kwargs
        if draft:
            ids = torch.cat([ids, ids.new_tensor([draft])], dim=-1)
            kwargs = self.model._update_model_kwargs_for_generation({}, dict(kwargs), num_new_tokens=len(draft))
        rows = len(draft) + 1
        inputs = self.model.prepare_inputs_for_generation(ids, next_sequence_length=rows, **kwargs)
        if "logits_to_keep" in inputs:
            inputs["logits_to_keep"] = rows
        return self.model(**inputs, return_dict=True)

    def _take(self, outputs: Any, draft: list[int]) -> tuple[list[int], bool]:
        """Choose tokens while the draft agrees, and one more; return them, and whether the text has ended."""
        rows = outputs.logits[:, -len(draft) - 1 :].to(copy=True, dtype=torch.float32, device=self.ids.device)
        said: list[int] = []
        ended = False
        for row, drafted in enumerate([*draft, None]):
            chosen = self._choose(rows[:, row])
            said.append(int(chosen))
            self.ids = torch.cat([self.ids, chosen[:, None]], dim=-1)
            if self.streamer is not None:
                self.streamer.put(chosen.cpu())
            ended = bool(self.stopping(self.ids, tuple(self.scores) if self._wants("output_scores") else None).all())
            if ended or said[-1] != drafted:
                break
        update = self.model._update_model_kwargs_for_generation
        self.kwargs = update(outputs, self.kwargs, is_encoder_decoder=False, num_new_tokens=len(said))
        return said, ended

    def _choose(self, logits: Tensor) -> Tensor:
        """Return the next token [1], from its logits [1, V], as transformers chooses it."""
        scores = self.processors(self.ids, logits)
        if self._wants("output_scores"):
            self.scores.append(scores)
        if self._wants("output_logits"):
            self.logits.append(logits)
        if self.config.do_sample:
            return torch.multinomial(scores.softmax(-1), num_samples=1).squeeze(1)
        return scores.argmax(-1)

    def _wants(self, name: str) -> bool:
        return bool(self.config.return_dict_in_generate and getattr(self.config, name))

    def result(self) -> Any:
        """Return ids, or the output object."""
        if not self.config.return_dict_in_generate:
            return self.ids
        found: dict[str, Any] = {"sequences": self.ids, "past_key_values": self.kwargs.get("past_key_values")}
        for name, rows in (("scores", self.scores), ("logits", self.logits)):
            found[name] = tuple(rows) if self._wants(f"output_{name}") else None
        return GenerateDecoderOnlyOutput(**found)
