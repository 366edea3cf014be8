"""What an output must be, as a request states it, and what the rules of sampling need of its parser."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args, runtime_checkable

from .errors import ConfigError
from .options import shown

if TYPE_CHECKING:
    from torch import Tensor

GrammarKind = Literal["json_object", "json_schema", "regex", "choice", "lark", "structural_tag"]
KINDS: tuple[str, ...] = get_args(GrammarKind)
LONGEST = 64 * 2**10  # characters of a grammar's text


@dataclass(frozen=True)
class Grammar:
    """A grammar that an output must meet.

    Args:
        kind: ``json_object`` (any object), ``json_schema``, ``regex``, ``choice`` (a JSON list of texts), ``lark``
            (llguidance's dialect) or ``structural_tag`` (JSON as vLLM reads it: structures and triggers).
        text: the schema, pattern, list or grammar; empty for ``json_object``.

    Raises:
        ConfigError: an unknown kind, or a text that is missing or too long.
    """

    kind: GrammarKind
    text: str = ""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConfigError(
                f"a grammar of kind {shown(self.kind)}", "there is no such kind", f"use one of {', '.join(KINDS)}"
            )
        if not isinstance(self.text, str):
            raise ConfigError(
                f"a {self.kind} of type {type(self.text).__name__}", "it is a text", "give it as a string"
            )
        if not self.text and self.kind != "json_object":
            raise ConfigError(f"a {self.kind} grammar", "its text is empty", "give one, or leave the grammar out")
        if len(self.text) > LONGEST:
            subject = f"a {self.kind} of {len(self.text):,} characters"
            raise ConfigError(subject, f"at most {LONGEST:,} are read", "give a smaller one")

    @classmethod
    def read(cls, value: Any) -> Grammar | None:
        """Return a grammar from its fields, as JSON has them.

        Raises:
            ConfigError: other fields.
        """
        if value is None or isinstance(value, cls):
            return value
        if not isinstance(value, Mapping) or not {*value} <= {"kind", "text"} or "kind" not in value:
            remedy = 'give Grammar("json_schema", "..")'
            raise ConfigError(f"grammar={shown(value)}", "a grammar has a kind and a text", remedy)
        return cls(**value)


@runtime_checkable
class Matcher(Protocol):
    """A grammar next to one output.

    Each answer is a function of the ids that are given, whatever was computed before.
    """

    fault: Exception | None  # why it could not answer once: drafts under it have ended

    def copy(self) -> Matcher:
        """Return one that may be used in another thread, at the same time."""

    def __call__(self, output: Sequence[int]) -> Tensor:
        """Return [V] bool: the tokens that may follow these."""

    def fill(self, output: Sequence[int], words: Tensor) -> None:
        """Write the same as the bits of ``words`` [(V + 31) // 32] int32, the lowest bit first."""

    def within(self, output: Sequence[int], paths: Sequence[Sequence[int]]) -> list[bool]:
        """Return which paths the grammar allows after an output; none where that cannot be determined."""

    def forced(self, output: Sequence[int], most: int) -> list[int]:
        """Return the tokens that begin every text that the grammar allows, where they are known."""
