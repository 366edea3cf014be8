"""How the tokens of a request are chosen, as the user states it.

A field of `SamplingParams` is declared once: the command line and the HTTP server read its declaration.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from .errors import ConfigError
from .grammar import Grammar
from .options import HIGHEST, IsNumber, check, option, shown

# Logits are float32. Within these bounds no rule overflows there, in whatever order they meet: the largest bias over
# the lowest temperature is 1e34.
COOLEST, HOTTEST = 1e-4, 1e6  # temperature
MOST_PENALTY = 1e6  # of repetition; the least is its inverse
MOST_BIAS = 1e30
MOST_SAMPLES = 1024  # of one request
TokenId = Annotated[int, Field(ge=0, le=HIGHEST)]
Bias = Annotated[float, Field(ge=-MOST_BIAS, le=MOST_BIAS), IsNumber()]


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Describe how the tokens of a request are chosen, when its output ends, and what is reported.

    Names and meanings follow vLLM's. All of them give the same tokens with and without speculation.

    Raises:
        ConfigError: a value of the wrong type or out of range.
    """

    temperature: float = option(
        1.0,
        help="0: greedy (argmax); 1: the model's own distribution; else from 1e-4 to 1e6",
        minimum=0,
        maximum=HOTTEST,
    )
    top_p: float = option(
        1.0, help="keep the likeliest tokens up to this cumulative probability, in (0, 1]", above=0, maximum=1
    )
    top_k: int = option(0, help="keep the k likeliest tokens; 0 or -1: all", minimum=-1)
    min_p: float = option(
        0.0,
        help="drop tokens below this fraction of the likeliest token's probability, in [0, 1]",
        minimum=0,
        maximum=1,
    )
    repetition_penalty: float = option(
        1.0,
        help="divide (negative logits: multiply) tokens of prompt and output; 1e-6 to 1e6",
        minimum=1 / MOST_PENALTY,
        maximum=MOST_PENALTY,
    )
    presence_penalty: float = option(
        0.0, help="subtract once from tokens in the output, in [-2, 2]", minimum=-2, maximum=2
    )
    frequency_penalty: float = option(
        0.0, help="subtract per occurrence in the output, in [-2, 2]", minimum=-2, maximum=2
    )
    logit_bias: dict[TokenId, Bias] | None = option(
        None,
        help="token id -> number added to its logit, in [-1e30, 1e30]",
        takes="logit_bias is a dict of token id to finite number, such as {42: -100.0}",
    )
    seed: int | None = option(
        None, help="any integer; without one a seed is drawn and returned with the output", unbounded=True
    )
    n: int = option(1, help=f"samples per prompt, at most {MOST_SAMPLES:,}", minimum=1, maximum=MOST_SAMPLES)
    stop: str | list[str] | None = option(
        None,
        help="strings that end the output; their text is left out",
        unbounded=True,
        takes="stop is a string or a list of strings",
    )
    stop_token_ids: list[TokenId] | None = option(
        None, help="token ids that end the output, in addition to EOS", takes="stop_token_ids is a list of token ids"
    )
    min_tokens: int = option(
        0, help="EOS, stop ids and stop strings are not considered before this many tokens", minimum=0
    )
    max_tokens: int | None = option(16, help="most tokens of output; None: as many as the context allows", minimum=1)
    ignore_eos: bool = option(False, help="do not end at EOS")
    logprobs: int | None = option(
        None, help="report log-probabilities of the chosen and of this many likeliest tokens", minimum=0, http=False
    )
    prompt_logprobs: int | None = option(None, help="the same for the tokens of the prompt", minimum=0)
    logprobs_mode: Literal["raw", "processed"] = option(
        "raw", help="log-probabilities before or after the sampling rules", http=False
    )
    echo: bool = option(False, help="the text of the answer begins with the prompt", http=False)
    include_stop_str_in_output: bool = option(False, help="keep the text of the stop string")
    skip_special_tokens: bool = option(True, help="leave special tokens out of the text")
    grammar: Grammar | None = option(None, help="what the output must be: Grammar(kind, text)", cli=False, http=False)

    def __post_init__(self) -> None:
        # Own copies: the caller's list or dict may change while the request runs.
        for name in ("stop", "stop_token_ids", "logit_bias"):
            value = getattr(self, name)
            if isinstance(value, list | tuple | dict):
                object.__setattr__(self, name, dict(value) if isinstance(value, dict) else list(value))
        object.__setattr__(self, "grammar", Grammar.read(self.grammar))
        check(self)
        if self.grammar is not None and self.ignore_eos:
            refuse("ignore_eos", True, "an output that meets its grammar ends there", "leave one of them out")
        if "" in self.stop_strings:
            refuse("stop", self.stop, "an empty string ends nothing", "give strings of at least one character")
        if 0 < self.temperature < COOLEST:
            refuse("temperature", self.temperature, "so close to 0 the logits overflow", "use 0, or 1e-4 and more")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            wrong = f"min_tokens is above max_tokens={shown(self.max_tokens)}"
            refuse("min_tokens", self.min_tokens, wrong, "lower min_tokens or raise max_tokens")

    @property
    def greedy(self) -> bool:
        """Return whether each token is the argmax of the processed logits."""
        return self.temperature == 0

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """Return `stop` as a tuple, empty where there is none."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


def refuse(name: str, value: object, wrong: str, remedy: str) -> None:
    """Raise ConfigError: a field has a value that cannot be."""
    raise ConfigError(f"{name}={shown(value)}", wrong, remedy)
