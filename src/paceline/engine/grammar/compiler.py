"""From a grammar's text to a parser over one vocabulary."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Sequence
from functools import partial
from threading import Lock
from typing import TYPE_CHECKING, Any

from ...core.errors import CapabilityError, ConfigError
from ...core.grammar import Grammar
from ...core.options import shown
from .matcher import GrammarMatcher, words_of

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from llguidance._lib import JsonCompileOptions

KEPT = 128  # compiled grammars
# Of llguidance's parser; its speeds make them about half a second for a grammar, and at most 50 ms for a token. What a
# token took to find out is kept with the grammar: a pattern that needs much at first needs little later.
INITIAL_FUEL, STEP_FUEL, STEP_ITEMS = 10_000_000, 700_000, 50_000
# No white space that is not in a string: an answer cannot continue with blanks, and most punctuation is forced.
# A schema's own "x-guidance" overrides this.
JSON_FORM: JsonCompileOptions = {"whitespace_flexible": False}


class Grammars:
    """Compiles grammars for one vocabulary, and keeps the last `KEPT`, also those refused. Safe with several threads.

    Args:
        tokenizer: the model's; None: there is none.
        vocab_size: of the model's logits.
        eos_ids: tokens that end an output.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, eos_ids: Sequence[int]) -> None:
        self._tokenizer, self._vocab_size, self._eos_ids = tokenizer, vocab_size, [*eos_ids]
        self._words: LLTokenizer | None = None
        self._compiled: OrderedDict[Grammar, LLMatcher | ConfigError] = OrderedDict()
        self._lock = Lock()

    def __contains__(self, grammar: Grammar) -> bool:
        """Return whether a matcher of it costs nothing."""
        return grammar in self._compiled

    def matcher(self, grammar: Grammar) -> GrammarMatcher:
        """Return a matcher at the beginning of an output.

        Raises:
            ConfigError: a grammar that cannot be read or met, or is too large.
            CapabilityError: the model's tokenizer cannot be used for grammars, or llguidance is not installed.
        """
        return GrammarMatcher(partial(self._parser, grammar), self._vocab_size)

    def _parser(self, grammar: Grammar) -> LLMatcher:
        """Return a parser at the beginning of an output; errors as of `matcher`."""
        with self._lock:
            compiled = self._compiled.get(grammar)
            if compiled is not None:
                self._compiled.move_to_end(grammar)
        if compiled is not None and not isinstance(compiled, ConfigError):
            parser = compiled.deep_copy()
            parser.compute_bitmask()
            if not parser.is_error():
                return parser
            compiled = None  # copies share a lexer, and one of them has brought it to its limits, where it stays
        if compiled is None:
            try:
                compiled = self._compile(grammar)
            except CapabilityError:
                raise  # of the model, not of the grammar
            except ConfigError as error:
                compiled = error
            with self._lock:
                self._compiled[grammar] = compiled
                while len(self._compiled) > KEPT:
                    self._compiled.popitem(last=False)
        if isinstance(compiled, ConfigError):
            raise compiled
        return compiled.deep_copy()

    def _compile(self, grammar: Grammar) -> LLMatcher:
        words = self._vocabulary()
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(
            initial_lexer_fuel=INITIAL_FUEL, step_lexer_fuel=STEP_FUEL, step_max_items=STEP_ITEMS, verbose_errors=False
        )
        source = self._source(grammar)
        failed, messages = LLMatcher.validate_grammar_with_warnings(source, words, limits=limits)
        if failed:
            raise _refused(grammar, messages[0])
        matcher = LLMatcher(words, source, limits=limits, log_level=0)
        if not matcher.is_error():
            mask = matcher.compute_bitmask()  # tries the limits of a step, and whether any text is possible
            if not matcher.is_error() and not any(mask):
                raise _refused(grammar, "no text meets it")
        if matcher.is_error():
            raise _refused(grammar, "no text meets it" if "NoExtension" in matcher.get_error() else matcher.get_error())
        return matcher

    def _source(self, grammar: Grammar) -> str:
        from llguidance import LLMatcher

        kind, text = grammar.kind, grammar.text
        if kind in ("json_object", "json_schema"):
            schema = {"type": "object"} if kind == "json_object" else _schema(grammar, text)
            return LLMatcher.grammar_from_json_schema(schema, defaults=JSON_FORM)
        if kind == "regex":
            return LLMatcher.grammar_from_regex(text)
        if kind == "choice":
            text = _choice(grammar)
        elif kind == "structural_tag":
            text = self._tags(grammar)
        return LLMatcher.grammar_from_lark(text)

    def _tags(self, grammar: Grammar) -> str:
        from llguidance import StructTag

        content = _json(grammar, grammar.text)
        form = '{"structures": [{"begin": "<f>", "schema": {..}, "end": "</f>"}], "triggers": ["<f"]}'
        try:
            triggers = [str(trigger) for trigger in content["triggers"]]
            tags = []
            for part in content["structures"]:
                trigger = next(t for t in triggers if t and part["begin"].startswith(t))
                schema = json.dumps({"x-guidance": JSON_FORM} | _schema(grammar, json.dumps(part["schema"])))
                tags.append(StructTag(trigger=trigger, begin=part["begin"], grammar=schema, end=part["end"]))
            special = {*self._tokenizer.all_special_tokens}
            return StructTag.to_grammar(tags, assume_special=all(tag.trigger in special for tag in tags))
        except (KeyError, TypeError, AttributeError, StopIteration, AssertionError) as error:
            wrong = "it has structures and triggers, and each structure begins with a trigger"
            raise ConfigError("a structural_tag", wrong, f"give {form}") from error

    def _vocabulary(self) -> LLTokenizer:
        if self._words is not None:
            return self._words
        what = "a grammar"
        try:
            from llguidance.hf import from_tokenizer
        except ImportError as error:
            raise CapabilityError(what, "llguidance is not installed", "run pip install 'paceline[serve]'") from error
        if self._tokenizer is None:
            raise CapabilityError(what, "this model has no tokenizer", "leave the grammar out")
        if not self._eos_ids:
            raise CapabilityError(what, "this model has no token that ends an answer", "leave the grammar out")
        try:
            whole = getattr(self._tokenizer, "whole", self._tokenizer)  # transformers', which it requests by class
            self._words = from_tokenizer(whole, n_vocab=self._vocab_size, eos_token=self._eos_ids)
        except Exception as error:  # llguidance raises ValueError and more for what it cannot read
            wrong = f"llguidance cannot read this model's tokenizer ({error})"
            raise CapabilityError(what, wrong, "leave the grammar out") from error
        return self._words


def _json(grammar: Grammar, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _refused(grammar, f"it is not JSON ({error})") from error


def _schema(grammar: Grammar, text: str) -> dict[str, Any]:
    value = _json(grammar, text)
    if not isinstance(value, dict | bool):
        raise _refused(grammar, "a schema is an object")
    return value if isinstance(value, dict) else ({} if value else {"not": {}})


def _choice(grammar: Grammar) -> str:
    texts = _json(grammar, grammar.text)
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) and text for text in texts):
        raise ConfigError(f"choice={shown(texts)}", "it is a list of texts, none of them empty", 'give ["yes", "no"]')
    return "start: " + " | ".join(json.dumps(text) for text in texts)


def _refused(grammar: Grammar, why: str) -> ConfigError:
    why = words_of(why)
    return ConfigError(f"the {grammar.kind} of a request", why or "it cannot be met", "change it, or leave it out")
