"""Headers of GGUF files: read as the ``gguf`` package reads them, and refused where they cannot be."""

from __future__ import annotations

import struct
import tracemalloc
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from kits.gguf_files import finish, write

from paceline.core.errors import CapabilityError, ConfigError
from paceline.weights.gguf import read_gguf
from paceline.weights.gguf_model import read_gguf_config
from paceline.weights.gguf_tokenizer import load_gguf_tokenizer


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("gguf") / "a.gguf", {"attn_v": "q6_k", "ffn_down": "q8_0"})


def test_metadata_and_tensors_are_those_of_the_gguf_package(plain: Path) -> None:
    ours, theirs = read_gguf(plain), gguf.GGUFReader(plain)
    fields = {name: field.contents() for name, field in theirs.fields.items() if not name.startswith("GGUF.")}
    assert list(ours.metadata) == list(fields)
    for name, value in fields.items():
        own = ours.metadata[name]
        assert (own if isinstance(own, str | int | float) else [*own]) == value, name
    assert list(ours.tensors) == [tensor.name for tensor in theirs.tensors]
    for tensor in theirs.tensors:
        own = ours.tensors[tensor.name]
        assert own.shape == tuple(int(n) for n in reversed(tensor.shape))
        assert (own.start, own.nbytes, own.type.number) == (tensor.data_offset, tensor.n_bytes, tensor.tensor_type)
        assert np.array_equal(own.raw().ravel(), np.asarray(tensor.data).view(np.uint8).ravel())


def _changed(plain: Path, folder: Path, at: int, data: bytes) -> Path:
    whole = bytearray(plain.read_bytes())
    whole[at : at + len(data)] = data
    made = folder / "changed.gguf"
    made.write_bytes(whole)
    return made


@pytest.mark.parametrize(
    ("at", "data", "error", "words"),
    [
        (0, b"GGUX", ConfigError, "begins with b'GGUX'"),
        (4, struct.pack(">I", 3), CapabilityError, "big-endian"),
        (4, struct.pack("<I", 9), CapabilityError, "version 9"),
        (8, struct.pack("<Q", 2**63), ConfigError, "announces 9,223,372,036,854,775,808 tensors"),
        (24, struct.pack("<Q", 2**62), ConfigError, "bytes of text"),
    ],
)
def test_a_broken_beginning_is_refused(
    plain: Path, tmp_path: Path, at: int, data: bytes, error: type[ConfigError], words: str
) -> None:
    with pytest.raises(error, match=words):
        read_gguf(_changed(plain, tmp_path, at, data))


@pytest.mark.parametrize("share", [0.0, 0.01, 0.7])
def test_a_truncated_file_is_refused(plain: Path, tmp_path: Path, share: float) -> None:
    whole = plain.read_bytes()
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(whole[: int(len(whole) * share)])
    with pytest.raises(ConfigError, match=r"truncated|bytes left|it is empty|begins with"):
        read_gguf(cut)


def _entry(plain: Path, name: str) -> int:
    """Where the entry of a tensor continues behind its name."""
    return plain.read_bytes().index(struct.pack("<Q", len(name)) + name.encode()) + 8 + len(name)


@pytest.mark.parametrize(
    ("offset", "data", "words"),
    [
        (0, struct.pack("<I", 9), "9 dimensions"),
        (4, struct.pack("<Q", 250), "250 values in a row, and a block of q4_0 32"),
        (20, struct.pack("<I", 77), "type 77"),
        (24, struct.pack("<Q", 2**50), "ends at byte"),
    ],
)
def test_a_tensor_that_cannot_be_is_refused(plain: Path, tmp_path: Path, offset: int, data: bytes, words: str) -> None:
    at = _entry(plain, "blk.0.attn_q.weight")
    with pytest.raises(ConfigError, match=words):
        read_gguf(_changed(plain, tmp_path, at + offset, data))


@pytest.mark.parametrize("at", [8, 16])
def test_more_tensors_or_keys_than_a_model_has_are_refused_before_they_are_made(at: int, tmp_path: Path) -> None:
    """A million entries of 24 bytes would be a hundred times as much as Python objects."""
    file = tmp_path / "many.gguf"
    file.write_bytes(
        struct.pack("<4sIQQ", b"GGUF", 3, *((1_000_000, 0) if at == 8 else (0, 1_000_000))) + bytes(24_000_000)
    )
    tracemalloc.start()
    with pytest.raises(ConfigError, match="announces 1,000,000 (tensors|keys), and at most 65,536 are read"):
        read_gguf(file)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


def test_a_text_beyond_the_file_is_refused_before_it_is_read(tmp_path: Path) -> None:
    file = tmp_path / "text.gguf"
    key = struct.pack("<Q1sIIQQ", 1, b"k", 9, 8, 1, 1 << 40)  # an array of one text
    file.write_bytes(struct.pack("<4sIQQ", b"GGUF", 3, 0, 1) + key + bytes(24_000_000))
    tracemalloc.start()
    with pytest.raises(ConfigError, match="its header continues beyond its"):
        read_gguf(file)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


def test_a_name_twice_is_refused(plain: Path, tmp_path: Path) -> None:
    at = _entry(plain, "blk.0.attn_q.weight") - len("blk.0.attn_q.weight")
    with pytest.raises(ConfigError, match=r"blk.1.attn_q.weight' is there twice"):
        read_gguf(_changed(plain, tmp_path, at, b"blk.1.attn_q.weight"))
    file = write(tmp_path / "keys.gguf", changed={"key.one": 1, "key.two": 2})
    with pytest.raises(ConfigError, match=r"key 'key.one' is there twice"):
        read_gguf(_changed(file, tmp_path, file.read_bytes().index(b"key.two"), b"key.one"))


def test_parts_are_one_model(plain: Path, tmp_path: Path) -> None:
    first, second = (tmp_path / f"m-0000{i}-of-00002.gguf" for i in (1, 2))
    first.write_bytes(plain.read_bytes())
    with pytest.raises(ConfigError, match="part 2 of 2 is missing"):
        read_gguf(first)
    write(second, seed=3)
    with pytest.raises(ConfigError, match="is there twice"):
        read_gguf(second)
    writer = gguf.GGUFWriter(second, "llama")
    writer.add_tensor("more.weight", np.ones(4, np.float32))
    finish(writer)
    for part in (first, second):
        model = read_gguf(part)
        assert model.path == first and "more.weight" in model.tensors and "output_norm.weight" in model.tensors
    with pytest.raises(ConfigError, match="no part 3 of 2"):
        read_gguf(tmp_path / "m-00003-of-00002.gguf")


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"split.no": 1}, r"00001-of-00002.gguf: it is part 2 of 2 .*name them m-00001-of-00002.gguf to m-00002-of-"),
        ({"split.tensors.count": 18}, r"the parts hold 21 tensors, and 18 are announced"),
    ],
)
def test_parts_that_contradict_their_names_are_refused(changed: dict[str, Any], words: str, tmp_path: Path) -> None:
    first, second = (tmp_path / f"m-0000{i}-of-00002.gguf" for i in (1, 2))
    writer = gguf.GGUFWriter(second, "llama")
    writer.add_uint16("split.no", 1)
    writer.add_uint16("split.count", 2)
    writer.add_tensor("more.weight", np.ones(4, np.float32))
    finish(writer)
    said = {"split.no": 0, "split.count": 2, "split.tensors.count": 21}
    assert len(read_gguf(write(first, changed=said)).tensors) == 21
    with pytest.raises(ConfigError, match=words):
        read_gguf(write(first, changed=said | changed))


def test_random_damage_is_refused_or_read(plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No crash, no hang, and nothing larger than the file: 400 damaged headers, tokenizers included."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    whole, rng = plain.read_bytes(), np.random.default_rng(11)
    header = _entry(plain, "blk.1.ffn_down.weight") + 40
    refused = 0
    for _ in range(400):
        changed = bytearray(whole)
        for _ in range(int(rng.integers(1, 4))):
            at = int(rng.integers(0, header))
            value = rng.choice([0, 1, 127, 255, int(rng.integers(0, 256))])
            changed[at] = int(value)
        file = tmp_path / "fuzzed.gguf"
        file.write_bytes(changed[: len(whole) if rng.random() < 0.8 else int(rng.integers(0, header))])
        try:
            model = read_gguf(file)
            for key in model.metadata:
                assert model.metadata[key] is not None
            assert sum(tensor.nbytes for tensor in model.tensors.values()) <= len(whole)
            read_gguf_config(file)
            load_gguf_tokenizer(model)
        except ConfigError:
            refused += 1
        file.unlink()
    assert 100 < refused < 400
