"""Checks of a request, and of an engine's parts, before anything runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite

from ..core.errors import CapabilityError, ConfigError
from ..core.sampling import SamplingParams
from ..model.applications import Application
from .base import Round
from .live import EngineLimits
from .tokens import TokenizerTexts


def check_prompt(prompt_ids: Sequence[int], limits: EngineLimits) -> None:
    """Raise ConfigError where a prompt is empty, too long, or holds an unknown id."""
    if not prompt_ids:
        raise ConfigError("an empty prompt", "a model continues at least one token", "give text, or a BOS token")
    if len(prompt_ids) >= limits.max_model_len:
        raise ConfigError(
            f"a prompt of {len(prompt_ids)} tokens",
            f"prompt and output together have room for {limits.max_model_len} tokens",
            "shorten the prompt, or raise max_model_len where model and kv_memory allow it",
        )
    check_ids("prompt token id", prompt_ids, limits, "encode the prompt with this model's tokenizer")


def check_said(lists: Sequence[Sequence[int]], samples: int, limits: EngineLimits) -> None:
    """Raise ConfigError where so many samples cannot have emitted the tokens."""
    if len(lists) > samples:
        raise ConfigError(f"tokens of {len(lists)} samples", f"the request has n={samples}", "give one list each")
    for tokens in lists:
        if tokens:
            check_ids("emitted token id", tokens, limits, "give the tokens that this model emitted")


def check_ids(what: str, ids: Sequence[int], limits: EngineLimits, remedy: str) -> None:
    """Raise ConfigError where an id is not in the vocabulary."""
    low, high = min(ids), max(ids)
    if low < 0 or high >= limits.vocab_size:
        wrong = f"ids go from 0 to {limits.vocab_size - 1}"
        raise ConfigError(f"{what} {low if low < 0 else high}", wrong, remedy)


def check_deadline(deadline_s: float | None) -> None:
    """Raise ConfigError where no time can be meant."""
    if deadline_s is not None and not (isfinite(deadline_s) and deadline_s > 0):
        raise ConfigError(f"deadline_s={deadline_s}", "a deadline is a time from now on", "give seconds above 0")


def check_room(max_len: int, pool_tokens: int) -> None:
    """Raise ConfigError where a sequence would never fit into the K/V pool."""
    if max_len - 1 > pool_tokens:  # the last token's K/V is never computed
        wrong = f"the K/V pool holds {pool_tokens}"
        raise ConfigError(f"a request of up to {max_len} tokens", wrong, "raise kv_memory, or lower max_tokens")


def check_rows_beside(round_: Round, applications: Mapping[str, Application]) -> None:
    """Refuse applications whose rows attend to rows next to them in a round that cannot give them any."""
    for application in applications.values():
        if application.beside is None:
            continue
        if round_.admits is None:
            raise CapabilityError(
                f"application {application.name!r} in round {round_.name!r}",
                "its answers depend on rows next to every generated token, and this round has none",
                "use the drafter that its files are for",
            )
        round_.admits(application)


def echo(texts: TokenizerTexts | None, prompt_ids: Sequence[int], prompt: str | None, params: SamplingParams) -> str:
    """Return the beginning of an answer's text: the prompt's, where it is to be echoed.

    Raises:
        ConfigError: its text is not known.
    """
    if not params.echo or prompt is not None:
        return prompt or "" if params.echo else ""
    if texts is None:
        raise ConfigError("echo=True with token ids", "this model has no tokenizer", "leave echo out")
    return texts.prompt(prompt_ids, params.skip_special_tokens)
