"""A tokenizer from data: byte-level BPE with the GPT-2 splitting rule, and a chat template."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from ..core.errors import ConfigError
from .data import SourceSpec, read_documents

SPECIAL = ("<|bos|>", "<|eos|>", "<|pad|>", "<|user|>", "<|assistant|>", "<|system|>")
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] | trim }}"
    "{% if m['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def train_tokenizer(
    sources: Sequence[SourceSpec], vocab_size: int, folder: Path, context: int, characters: int = 20_000_000
) -> None:
    """Learn a vocabulary of ``vocab_size`` tokens, `SPECIAL` included, and write the tokenizer's files (by the
    `tokenizers` library) for a model of ``context`` positions. Each source gives its first ``characters /
    len(sources)`` characters.

    Raises:
        ConfigError: a vocabulary too small for the bytes and the special tokens.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    if vocab_size < 256 + len(SPECIAL):
        raise ConfigError(f"vocab_size={vocab_size}", "no room for the bytes", f"give {256 + len(SPECIAL)} or more")
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(_texts(sources, characters), trainer)
    bos = SPECIAL[0]
    made.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A $B", special_tokens=[(bos, made.token_to_id(bos))]
    )
    folder.mkdir(parents=True, exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    facts = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL[0],
        "eos_token": SPECIAL[1],
        "pad_token": SPECIAL[2],
        "extra_special_tokens": list(SPECIAL[3:]),
        "model_max_length": context,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")


def _texts(sources: Sequence[SourceSpec], characters: int) -> Iterator[str]:
    for spec in sources:
        left = characters // len(sources)
        for record in read_documents(Path(spec.file)):
            text = record.get("text") or f"{record['prompt']}\n{record['completion']}"
            yield text[:left]
            left -= len(text)
            if left <= 0:
                break
