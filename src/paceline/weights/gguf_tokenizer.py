"""The tokenizer of a GGUF file: its vocabulary and rules as a Hugging Face tokenizer, whose ids are llama.cpp's.

llama.cpp's ids are others in two rare cases, where it rewrites a pattern of the model for its own regex engine: marks
and letters beyond ASCII in ``tekken`` and ``gpt-4o``, and wide spaces in ``deepseek-coder``. There
the pattern that the model was trained with holds.

Two kinds of vocabulary are read. ``gpt2`` merges pairs of bytes by rank, within pieces that the file's pre-tokenizer
cuts; ``llama`` (SentencePiece) merges characters by the score of the result, and falls back to bytes.

Source: llama.cpp's ``llama-vocab.cpp`` (which pre-tokenizer cuts how, and defaults of flags); the patterns are those of
the models' own ``tokenizer.json``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from ..core.errors import CapabilityError, ConfigError
from ..core.options import shown
from ..kernels.memory import give_back
from .gguf import GGUF

MOST_MERGES = 16  # for each token; Llama 3 has 2.2
CONTROL, USER_DEFINED, UNKNOWN = 3, 4, 2  # types of tokens
SPACE = "\u2581"  # what SentencePiece writes for a space
_BARE = ("<unk>", "<s>", "<|endoftext|>")  # special tokens of Phi-3 that keep the spaces after them

# Patterns of pre-tokenizers. Each cuts the pieces that the one before it left.
_SHORT = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_ENDS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_SHORT}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_ENDS}"
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASES = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s"
_TEKKEN = rf"{_CASES % ('', '')}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_ENDS}"
_GPT4O = rf"{_CASES % (_SHORT + '?', _SHORT + '?')}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_ENDS}"
_CJK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}")
_DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")  # converters know no better name


_KINDS = {
    "gpt-2 gigachat a.x-4.0 mellum trillion": (_GPT2,),
    "smollm starcoder minerva-7b": (r"\p{N}", _GPT2),
    "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0": (_LLAMA3,),
    "smaug-bpe": (_LLAMA3,),
    "qwen2 deepseek-r1-qwen kormo megrez": (_QWEN2,),
    "tekken": (_TEKKEN,),
    "gpt-4o kanana2": (_GPT4O,),
    "deepseek-coder": _DEEPSEEK_CODER,
    "default": _DEFAULT,
}
# Of these a piece that is a token is taken as it is, whatever its merges are, and a text begins with BOS where the file
# has no flag for that.
_WHOLE = {*["llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "tekken"]}
PRE_TOKENIZERS = {name: patterns for names, patterns in _KINDS.items() for name in names.split()}


def load_gguf_tokenizer(model: GGUF) -> Any:
    """Return a file's tokenizer with its chat template, as a ``transformers.TokenizersBackend``; None: it has none.

    Raises:
        ConfigError: a vocabulary that contradicts itself.
        CapabilityError: a kind of vocabulary or a pre-tokenizer that is not known here.
    """
    if "tokenizer.ggml.tokens" not in model.metadata:
        return None
    backend = _Builder(model).tokenizer()
    give_back()  # of 262,144 tokens 190 MB
    from tokenizers import AddedToken, Tokenizer, models
    from transformers import TokenizersBackend

    maker, template = _Builder(model), model.metadata.get("tokenizer.chat_template", "").removeprefix("\ufeff") or None
    roles = {f"{name}_token": token for name, key in _NAMED.items() if (token := maker.named(key))}
    added = {token.content for token in backend.get_added_tokens_decoder().values()}
    backend.add_tokens([AddedToken(token, special=True) for token in roles.values() if token not in added])
    options = {"clean_up_tokenization_spaces": False, "chat_template": template, **roles}
    tokenizer = TokenizersBackend(tokenizer_object=Tokenizer(models.BPE()), **options)  # which it copies: an empty one
    tokenizer._tokenizer = backend
    # llama.cpp begins a chat with BOS where the file's flag is set and the template does not write it.
    if template and maker.adds("bos") and not _writes(tokenizer, tokenizer.bos_token):
        tokenizer.chat_template = "{{ bos_token }}" + template
    return tokenizer


_NAMED = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}  # transformers' word: the file's


def _writes(tokenizer: Any, bos: str | None) -> bool:
    """Return whether the template begins a chat with ``bos``; one that fails when tried is assumed to."""
    try:
        text = tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False)
    except Exception:  # templates are programs and raise what they like
        return True
    return bos is None or str(text).lstrip().startswith(bos)


class _Builder:
    """Builds the tokenizer that a file describes."""

    def __init__(self, model: GGUF) -> None:
        self.model, self.metadata = model, model.metadata
        self.subject = f"the tokenizer in {model.path}"
        self.kind = self.metadata.get("tokenizer.ggml.model")
        if self.kind not in ("gpt2", "llama"):
            wrong = f"tokenizer.ggml.model is {shown(self.kind)}; known here are 'gpt2' and 'llama'"
            raise CapabilityError(self.subject, wrong, "use another model")

    @cached_property
    def tokens(self) -> list[str]:
        """Return the pieces; an empty one cannot be matched, and llama.cpp gives it a name."""
        return [_matchable(i, token) for i, token in enumerate(self._list("tokens", None) or [])]

    @cached_property
    def types(self) -> list[int]:
        """Return the type of each token."""
        return [int(kind) for kind in self._list("token_type", len(self.tokens)) or [1] * len(self.tokens)]

    def _list(self, name: str, count: int | None) -> list[Any] | None:
        entries = self.metadata.get(f"tokenizer.ggml.{name}")
        if entries is None:
            return None
        if count is not None and len(entries) != count:
            self._refuse(f"it has {count:,} tokens, and {len(entries):,} entries in tokenizer.ggml.{name}")
        return list(entries)

    def _refuse(self, wrong: str) -> None:
        raise ConfigError(self.subject, wrong, "download the file again, or convert the model again")

    @property
    def pre(self) -> str:
        """Return the name of the file's pre-tokenizer.

        Raises:
            CapabilityError: an unknown name, or none: it is not guessed, since ids would silently be others.
        """
        name = self.metadata.get("tokenizer.ggml.pre")
        if name in PRE_TOKENIZERS:
            return str(name)
        wrong = "it names no pre-tokenizer" if name is None else f"its pre-tokenizer {shown(name)} is not known here"
        remedy = f"convert it again with a newer llama.cpp; known are {', '.join(sorted(PRE_TOKENIZERS))}"
        raise CapabilityError(self.subject, wrong, remedy)

    def named(self, name: str) -> str | None:
        """Return the text of the token that the file gives a role.

        Raises:
            ConfigError: an id that no token has.
        """
        token = self.model.token_id(name)
        return None if token is None else _matchable(token, self.metadata["tokenizer.ggml.tokens"][token])

    def adds(self, name: str) -> bool:
        """Return whether a text begins with BOS, or ends with EOS."""
        flag = self.metadata.get(f"tokenizer.ggml.add_{name}_token")
        if flag and self.named(name) is None:
            self._refuse(f"tokenizer.ggml.add_{name}_token is true, and tokenizer.ggml.{name}_token_id is missing")
        usual = name == "bos" and (self.kind == "llama" or self.pre in _WHOLE)
        return bool(usual if flag is None else flag) and self.named(name) is not None

    def tokenizer(self) -> Any:
        """Return the ``tokenizers.Tokenizer``.

        Raises:
            ConfigError: tokens that are there twice, or merges of pieces that are none.
        """
        vocabulary = {token: i for i, token in enumerate(self.tokens)}
        if len(vocabulary) != len(self.tokens):
            twice = next(token for i, token in enumerate(self.tokens) if vocabulary[token] != i)
            self._refuse(f"token {shown(twice)} is there twice")
        tokenizer = self._by_rank(vocabulary) if self.kind == "gpt2" else self._by_score(vocabulary)
        self._add_whole(tokenizer)
        self._add_ends(tokenizer)
        return tokenizer

    def _by_rank(self, vocabulary: dict[str, int]) -> Any:
        from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

        pre = self.pre
        count = len(self.metadata.get("tokenizer.ggml.merges", ()))
        if count > MOST_MERGES * len(self.tokens):
            self._refuse(f"it has {count:,} merges for {len(self.tokens):,} tokens")
        merges = [tuple(merge.split(" ")) for merge in self._list("merges", None) or []]
        broken = next((merge for merge in merges if len(merge) != 2 or "".join(merge) not in vocabulary), None)
        if broken is not None:
            self._refuse(f"the merge {shown(' '.join(broken))} makes no token")
        try:
            model = models.BPE(vocab=vocabulary, merges=merges, ignore_merges=pre in _WHOLE)
        except Exception as error:  # tokenizers raises plain Exception
            self._refuse(f"its merges cannot be used ({error})")
        tokenizer = Tokenizer(model)
        cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in PRE_TOKENIZERS[pre]]
        last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*cuts, last])
        tokenizer.decoder = decoders.ByteLevel()
        return tokenizer

    def _by_score(self, vocabulary: dict[str, int]) -> Any:
        from tokenizers import Tokenizer, decoders, models, normalizers

        scores = self._list("scores", len(self.tokens))
        if scores is None:
            self._refuse("it has no tokenizer.ggml.scores")
        unknown = next((self.tokens[i] for i, kind in enumerate(self.types) if kind == UNKNOWN), None)
        tokenizer = Tokenizer(
            models.BPE(
                vocab=vocabulary,
                merges=_merges(vocabulary, [float(score) for score in scores or ()], self.types),
                unk_token=unknown,
                fuse_unk=True,
                byte_fallback=True,
            )
        )
        prefix = bool(self.metadata.get("tokenizer.ggml.add_space_prefix", True))
        spaces = normalizers.Replace(" ", SPACE)
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), spaces]) if prefix else spaces
        steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
        tokenizer.decoder = decoders.Sequence([*steps, *([decoders.Strip(" ", 1, 0)] if prefix else [])])
        return tokenizer

    def _add_whole(self, tokenizer: Any) -> None:
        """Add tokens that are matched as a whole before anything else is cut."""
        from tokenizers import AddedToken

        # Phi-3's files do not state that its marks of turns swallow the spaces after them.
        phi3 = re.search("phi-?3", str(self.metadata.get("general.name", "")).lower()) is not None
        for kind in (UNKNOWN, CONTROL, USER_DEFINED):
            whole = [token for token, type_id in zip(self.tokens, self.types, strict=True) if type_id == kind]
            tokenizer.add_tokens(
                [
                    AddedToken(
                        token, normalized=False, special=kind != USER_DEFINED, rstrip=phi3 and token not in _BARE
                    )
                    for token in whole
                ]
            )

    def _add_ends(self, tokenizer: Any) -> None:
        from tokenizers import processors

        begin, end = ([self.named(name)] if self.adds(name) else [] for name in ("bos", "eos"))
        if begin or end:
            names = [str(token) for token in (*begin, *end)]
            one = " ".join([*(f"{token}:0" for token in begin), "$A:0", *(f"{token}:0" for token in end)])
            ids = [(name, self.tokens.index(name)) for name in dict.fromkeys(names)]
            tokenizer.post_processor = processors.TemplateProcessing(single=one, pair=f"{one} $B:1", special_tokens=ids)


def _matchable(i: int, token: str) -> str:
    return token or f"[EMPTY_{i}]"


def _merges(vocabulary: Mapping[str, int], scores: Sequence[float], types: Sequence[int]) -> list[tuple[str, str]]:
    """Return every way to make a token of two others; the likelier the token, the earlier."""
    merged = ((token, i) for token, i in vocabulary.items() if types[i] not in (CONTROL, USER_DEFINED))
    ranked = sorted((-scores[i], i, token) for token, i in merged)
    merges = []
    for _, _, token in ranked:
        for at in range(1, len(token)):
            first, second = token[:at], token[at:]
            if first in vocabulary and second in vocabulary:
                merges.append((first, second))
    return merges
