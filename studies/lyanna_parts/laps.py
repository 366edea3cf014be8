"""The kernels with a clock inside: how long each part of a draft takes in the one compiled call that makes all of it.

The library's own kernels have no clock. These are made of the same source, with a few lines put between its own.
"""

from __future__ import annotations

import ctypes
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

from paceline import kernels
from paceline.core.errors import ConfigError
from paceline.kernels import abi

PARTS = ("layer", "head", "choice")  # the head of EAGLE's drafts ranks its logits as it makes them
CLOCK = """double laps[3];  // s in each of the parts
double* pl_laps() { return laps; }
struct Lap {
  Clock::time_point last = Clock::now();
  void to(int part) {
    const Clock::time_point now = Clock::now();
    laps[part] += std::chrono::duration<double>(now - last).count(), last = now;
  }
  ~Lap() { to(2); }
};
"""
GROW, SAMPLE = "int pl_grow(const Model* m, ", "int pl_sample(const Model* m, "
RANK = (
    "    rank(*m, m->head, m->norm, rows.hidden.data(), limit, k, true, wanted, best.data(), log_q.data(), p->threads)"
)
GROWN = "      at += size * k;\n    }\n"
HEAD = "  if (total) head(*m, drafted.data(), total, raw, (int)threads);\n"
COUNTS = (
    "  if (count < 0 || rules->levels < 1 || rules->topk < 1) return BAD_COUNT;\n",
    "  if (count < 0 || branches < 1 || check_fuse(*m, *f) != DONE || f->state.n == 0) return BAD_COUNT;\n",
)
PUT = {  # a piece of the source, and what it becomes
    GROW: CLOCK + GROW,
    **{count: "  Lap lap;\n" + count for count in COUNTS},
    f"{RANK};\n": f"    lap.to(0);\n{RANK};\n    lap.to(1);\n",
    GROWN: f"{GROWN}    lap.to(2);\n",
    HEAD: f"  lap.to(0);\n{HEAD}  lap.to(1);\n",
}
Read = Callable[[], list[float]]  # ms in each of `PARTS` so far


def with_clock(folder: Path) -> Path:
    """A copy of the kernels' sources in ``folder``, with a clock in it.

    Raises:
        ConfigError: a place of them is not where it was.
    """
    source = folder / kernels.SOURCE.name
    headers = shutil.copytree(kernels.SOURCE.with_suffix(""), source.with_suffix(""), dirs_exist_ok=True)
    shutil.copyfile(kernels.SOURCE, source)
    texts = {path: path.read_text("utf-8") for path in headers.rglob("*.h")}
    for piece, put in PUT.items():
        places = [path for path, text in texts.items() for _ in range(text.count(piece))]
        if len(places) != 1:
            wrong = f"the kernels have {len(places)} lines {piece.strip().splitlines()[-1]!r}, one is wanted"
            raise ConfigError("the parts of a compiled draft", wrong, "correct studies/lyanna_parts/laps.py")
        texts[places[0]] = texts[places[0]].replace(piece, put)
    for path, text in texts.items():
        path.write_text(text, "utf-8")
    return source


@contextmanager
def timed_kernels(folder: Path) -> Iterator[Read]:
    """Models that are loaded in here run on kernels with a clock, built from a source in ``folder``."""
    library = abi.declared(kernels.opened(with_clock(folder)), "\n".join(kernels._texts(kernels.SOURCE)))
    library.isa = library.pl_init(kernels.AMX)
    clock = ctypes.CDLL(library.path).pl_laps  # the kernels have no such function: their library does not declare it
    clock.restype = ctypes.POINTER(ctypes.c_double)
    laps = clock()
    with patch.object(kernels, "library", lambda: library), patch.object(kernels, "in_use", lambda: library):
        yield lambda: [1e3 * laps[n] for n in range(len(PARTS))]
