"""llama.cpp's converter, taught two more cases: a tokenizer it does not know, and a model without one.

Neither changes a weight. Prompts go to the server as token ids, so the vocabulary is there for its size alone.

    llama_convert.py CONVERTER FOLDER OUTFILE OUTTYPE
"""

import json
import os
import runpy
import sys
import tempfile
from pathlib import Path


def main(converter, folder, outfile, outtype):
    converter = Path(converter).resolve()
    sys.path[:0] = [str(converter.parent / "gguf-py"), str(converter.parent)]
    _accept_unknown_tokenizers()
    with tempfile.TemporaryDirectory() as scratch:
        if not any(Path(folder).glob("tokenizer*")):
            folder = _with_vocabulary(Path(folder).resolve(), Path(scratch))
        sys.argv = [str(converter), str(folder), "--outfile", outfile, "--outtype", outtype]
        runpy.run_path(str(converter), run_name="__main__")


def _accept_unknown_tokenizers():
    """A byte-level BPE that the converter has no name for is split like GPT-2's."""
    from conversion import ModelBase, TextModel

    known = TextModel.get_vocab_base_pre

    def get_vocab_base_pre(self, tokenizer):
        try:
            return known(self, tokenizer)
        except NotImplementedError:
            return "gpt-2"

    assert issubclass(TextModel, ModelBase)
    TextModel.get_vocab_base_pre = get_vocab_base_pre


def _with_vocabulary(folder, scratch):
    """A copy (of links) with a byte-level vocabulary of the model's size; llama.cpp wants one merge at least."""
    from tokenizers import Tokenizer, decoders
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel

    for file in folder.iterdir():
        os.symlink(file, scratch / file.name)
    config = json.loads((folder / "config.json").read_text())
    special = ["<|bos|>", "<|eos|>"]
    tokens = [*special, *sorted(ByteLevel.alphabet()), "ab"][: config["vocab_size"]]
    tokens += [f"<{i}>" for i in range(len(tokens), config["vocab_size"])]
    tokenizer = Tokenizer(BPE({token: i for i, token in enumerate(tokens)}, [("a", "b")]))
    tokenizer.pre_tokenizer, tokenizer.decoder = ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    tokenizer.save(str(scratch / "tokenizer.json"))
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": special[0], "eos_token": special[1]}
    (scratch / "tokenizer_config.json").write_text(json.dumps(names))
    return scratch


if __name__ == "__main__":
    main(*sys.argv[1:])
