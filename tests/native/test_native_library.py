"""The kept library of compiled kernels: whole or compiled anew, the user's own or not run."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline import kernels
from paceline.core.sampling import RULES, RULES_FIELDS
from paceline.kernels import abi

pytestmark = pytest.mark.skipif(
    kernels._output(["sh", "-c", "command -v c++"], 60)[0] != 0, reason="there is no C++ compiler"
)
ENTRIES = abi._ENTRY.findall("\n".join(kernels._texts(kernels.SOURCE)))
STRUCTS = (kernels.SOURCE.with_suffix("") / "abi.h").read_text("utf-8")


def stand_in(returned: str, name: str, taken: str) -> str:
    """A function of this name and of its kinds that does nothing."""
    return f"{returned} {name}({taken}) {{ {'' if returned == 'void' else 'return 0;'} }}"


# Compiled in a moment, and long enough that a half of it lacks pages that the loader reads.
STAND_IN = "\n".join(
    [STRUCTS, 'extern "C" {', *(stand_in(*entry) for entry in ENTRIES), "}", 'extern "C" char padding[1 << 20] = {1};']
)
LEVELS = {"plain": ("-O0", ""), "wide": ("-O0", "avx2 fma"), "wider": ("-O0", "avx2 amx_tile")}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that a stand-in for the kernels is compiled into."""
    source = tmp_path / "kernels.cpp"
    source.write_text(STAND_IN)
    monkeypatch.setattr(kernels, "SOURCE", source)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in ("CXX", kernels.SWITCH):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "cache" / "paceline" / "kernels"


def library_in(folder: Path) -> Path:
    (found,) = folder.glob("*.so")
    return found


def load() -> tuple[object, str | None]:
    """What a new process would find: the library, or why there is none."""
    found, why = kernels._load.__wrapped__()
    return found, why


def _halve(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))


def _empty(path: Path) -> None:
    path.write_bytes(b"")


def _other(path: Path) -> None:
    path.write_bytes(b"\x7fELF" + bytes(path.stat().st_size - 4))


def test_the_functions_are_found(cache: Path):
    text = "\n".join(kernels._texts(Path(kernels.__file__).parent / "cpp" / "kernels.cpp"))
    assert sorted(name for _, name, _ in ENTRIES) == sorted(
        re.findall(r"^\s*\w+[ *]+(pl_\w+)\([^;]*?\) *\{", text, re.M)
    )
    found: Any = load()[0]
    assert found.pl_packed_size.argtypes == [ctypes.c_int64, ctypes.c_int64, ctypes.c_int]
    assert found.pl_packed_size.restype is ctypes.c_int64 and found.pl_pack.restype is None
    assert found.pl_recall.argtypes[-1] is ctypes.c_double and found.pl_suffixes_new.restype is ctypes.c_void_p


@pytest.mark.parametrize(
    ("field", "other", "words"),
    [
        ("  double ms; ", "  int8_t ms; ", r"the kernels have a kind 'int8_t'"),
        ("  double ms; ", "  double* ms, late; ", r"cannot read"),
    ],
    ids=["unknown", "no pointer"],
)
def test_a_struct_that_cannot_be_read_is_refused(field: str, other: str, words: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(abi, "STRUCTS", {})
    assert field in STRUCTS
    with pytest.raises(RuntimeError, match=words):
        abi._read(STRUCTS.replace(field, other, 1))


def test_passes_and_rules_are_packed_as_they_are_read():
    """They are written by position: a field of another place, or of other than 8 bytes, would shift them."""
    passes = "rows tokens positions slots slot_base spans num_spans wanted num_wanted rules logits masks chosen"
    for struct, names in ((abi.CTokenPass, passes), (abi.CSpan, "start stop prefix base keys drafted parents")):
        assert [name for name, _ in struct._fields_] == names.split()
        assert ctypes.sizeof(struct) == 8 * len(names.split())
    letters = {ctypes.c_uint64: "Q", ctypes.c_int64: "q", ctypes.c_double: "d"}
    own = [(name, letters[kind]) for name, kind in abi.CRules._fields_]
    assert own == [*zip(RULES_FIELDS.split(), RULES.format.removeprefix("="), strict=True)]


def test_what_is_kept_is_used_again(cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    first = kernels.built(kernels.SOURCE)
    assert [record.getMessage()[:20] for record in caplog.records] == ["compiling the layers"]
    assert first == library_in(cache) and hashlib.sha256(first.read_bytes()).hexdigest() in first.name
    assert first.stat().st_mode & 0o077 == 0 and cache.stat().st_mode & 0o077 == 0

    def never(*_: object) -> Path:
        raise AssertionError("compiled again")

    monkeypatch.setattr(kernels, "_compile", never)
    assert kernels.built(kernels.SOURCE) == first and len(caplog.records) == 1


def test_a_library_of_the_package_is_opened_where_it_belongs_to_the_sources(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Of several the best that the processor has; none is compiled for it."""
    monkeypatch.setattr(kernels, "SHIPPED", shipped := tmp_path / "compiled")
    monkeypatch.setattr(kernels, "LEVELS", LEVELS)
    shipped.mkdir()
    library = kernels.built(kernels.SOURCE, "plain")
    for level in LEVELS:
        shutil.copy(library, shipped / kernels._shipped_name(kernels.SOURCE, level))
    monkeypatch.setenv("CXX", "no-such-compiler")
    has = {"avx2", "fma"}
    monkeypatch.setattr(kernels, "_processor", lambda: has)

    def opened(level: str | None) -> str | None:
        if level is not None:
            monkeypatch.setenv(kernels.SWITCH, level)
        return load()[0] and Path(load()[0].path).name.split("-")[1]  # type: ignore[attr-defined]

    assert opened(None) == "wide" and opened("plain") == "plain"
    assert opened("wider") is opened("1") is opened("0") is None
    monkeypatch.delenv(kernels.SWITCH)
    has.clear()
    assert opened(None) == "plain"
    kernels.SOURCE.write_text(f"{STAND_IN}\n// changed")
    assert "no C++ compiler 'no-such-compiler' was found" in str(load()[1])


@pytest.mark.parametrize("level", kernels.LEVELS)
def test_a_level_of_instructions_is_compiled_for_alone(cache: Path, level: str, monkeypatch: pytest.MonkeyPatch):
    """Each level that this processor has is one library, and its number in C++ is its place in the table."""
    headers = (
        "algorithm",
        "cstdint",
        "cstring",
        "vector",
        "unistd.h",
        *["sys/syscall.h"] * sys.platform.startswith("linux"),
    )
    simd = (Path(kernels.__file__).parent / "cpp" / "kernels" / "simd.h").read_text("utf-8").replace("#pragma once", "")
    rest = STAND_IN.replace(stand_in(*next(entry for entry in ENTRIES if entry[1] == "pl_init")), "")
    kernels.SOURCE.write_text("\n".join([*(f"#include <{header}>" for header in headers), simd, rest]))
    monkeypatch.setenv(kernels.SWITCH, level)
    found, why = load()
    if kernels.LEVELS[level][1] and found is None:
        assert f"{level!r} needs instructions that this processor lacks: " in str(why)
        return
    assert list(kernels.LEVELS)[found.isa] == level  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("word", "why"),
    [
        ("0", "PACELINE_NATIVE=0"),
        ("generic", "'generic' is not a level of instructions; use 0, 1 or one of baseline, "),
    ],
)
def test_switched_off_or_by_a_word_that_is_no_level_there_are_none(
    cache: Path, word: str, why: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv(kernels.SWITCH, word)
    found, said = load()
    assert found is None and why in str(said)


def test_a_change_in_a_header_is_compiled_anew(cache: Path):
    header = kernels.SOURCE.with_suffix("") / "drafts" / "one.h"
    header.parent.mkdir(parents=True)
    header.write_text("// before")
    first = kernels.built(kernels.SOURCE)
    header.write_text("// after")
    second = kernels.built(kernels.SOURCE)
    header.rename(header.with_name("two.h"))
    assert len({first, second, kernels.built(kernels.SOURCE)}) == 3


@pytest.mark.parametrize("damage", [_halve, _flip, _empty, _other], ids=lambda damage: damage.__name__)
def test_a_broken_library_is_compiled_anew(
    cache: Path, damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture
):
    whole = kernels.built(kernels.SOURCE).read_bytes()
    damage(library_in(cache))
    assert library_in(cache).read_bytes() != whole
    with caplog.at_level(logging.WARNING):
        assert kernels.built(kernels.SOURCE).read_bytes() == whole
    assert "broken: they are compiled again" in caplog.text
    assert library_in(cache).read_bytes() == whole


def compiler(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Have a script compile, which may call the compiler in its turn."""
    (folder / "compiler").write_text(f'#!/bin/sh\n{script}\nexec c++ "$@"\n')
    (folder / "compiler").chmod(0o755)
    monkeypatch.setenv("CXX", str(folder / "compiler"))


def test_a_compiler_that_hangs_is_given_up(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    compiler(tmp_path, monkeypatch, 'case "$*" in *" -c "*) exec sleep 60;; esac')
    monkeypatch.setattr(kernels, "COMPILE_SECONDS", 0.5)
    found, why = load()
    assert found is None and "timed out after 0.5 seconds" in str(why)


def test_a_crash_on_the_way_leaves_nothing_that_is_taken_for_a_library(cache: Path, monkeypatch: pytest.MonkeyPatch):
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr(kernels, "_sha256", fail)
        found, why = load()
        assert found is None and "No space left" in str(why)
        assert not list(cache.glob("*.so"))
    assert load()[1] is None and library_in(cache)


def _folder(mode: int) -> Callable[[Path], None]:
    return lambda cache: cache.chmod(mode)


def _file(mode: int) -> Callable[[Path], None]:
    return lambda cache: library_in(cache).chmod(mode)


@pytest.mark.parametrize("change", [_folder(0o770), _folder(0o707), _folder(0o1777), _file(0o720), _file(0o702)])
def test_what_others_may_write_to_is_not_run(
    cache: Path, change: Callable[[Path], None], caplog: pytest.LogCaptureFixture
):
    assert load()[1] is None
    change(cache)
    with caplog.at_level(logging.WARNING):
        found, why = load()
    assert found is None and "others than its owner may write to" in str(why) and "chmod go-w" in str(why)
    assert "torch's are used: others than its owner" in caplog.text


@pytest.mark.parametrize("what", ["folder", "file"])
def test_what_another_user_owns_is_not_run(cache: Path, what: str, monkeypatch: pytest.MonkeyPatch):
    """Root's files are another user's, too, unless root runs this."""
    assert load()[1] is None
    owner, watched = cache.stat().st_uid, cache if what == "folder" else library_in(cache)
    stat = Path.stat

    def foreign(path: Path, **options: bool) -> os.stat_result:
        facts = stat(path, **options)
        return os.stat_result([*facts[:4], owner + 1, *facts[5:]]) if path == watched else facts

    with monkeypatch.context() as another:
        another.setattr(Path, "stat", foreign)
        found, why = load()
        assert found is None and f"belongs to user {owner + 1}, not to user {owner}" in str(why)
    assert load()[1] is None
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    assert f"belongs to user {owner}, not to user {owner + 1}" in str(load()[1])


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_file_that_was_given_away_is_not_run(cache: Path):
    assert load()[1] is None
    os.chown(library_in(cache), 12345, 12345)
    assert "belongs to user 12345, not to user 0" in str(load()[1])
    os.chown(library_in(cache), 0, 0)
    os.chown(cache, 12345, 12345)
    assert "belongs to user 12345, not to user 0" in str(load()[1])


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"CXX": 'g++ "'}, "is not a command .No closing quotation."),
        ({"CXX": "no-such-compiler"}, "no C.. compiler 'no-such-compiler' was found"),
        ({"XDG_CACHE_HOME": "somewhere/else"}, "name one by an absolute path"),
        ({"XDG_CACHE_HOME": "{source}"}, "cannot be kept in .*name a folder that can be written to"),
    ],
)
def test_variables_that_cannot_be_leave_torch(
    cache: Path,
    variables: dict[str, str],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
):
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.iterdir())
    for name, value in variables.items():
        monkeypatch.setenv(name, value.format(source=kernels.SOURCE))
    with caplog.at_level(logging.WARNING):
        found, why = load()
    assert found is None and re.search(words, str(why))
    assert "torch's are used" in caplog.text
    assert sorted(tmp_path.iterdir()) == before
