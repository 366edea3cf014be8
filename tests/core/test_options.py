"""Fields of config dataclasses: which values fit, and what is said of those that do not."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.errors import ConfigError
from paceline.core.options import HIGHEST, check, option, read, written


@dataclass(frozen=True, kw_only=True)
class Sample:
    count: int = option(1, help="how many", minimum=1)
    share: float = option(0.5, help="how much", above=0, below=1)
    size: int | str | None = option(None, help="how large")
    kind: str = option("a", help="which", choices=("a", "b"), unknown="there is no such kind")
    mode: Literal["raw", "done"] = option("raw", help="how")
    seed: int | None = option(None, help="of draws", unbounded=True)
    place: Path | None = option(None, help="where")
    steps: tuple[int, ...] = option((), help="when")
    plain: bool = False

    def __post_init__(self) -> None:
        check(self, "sample,")


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"count": 0}, "sample,count=0: count must be 1 or more. Give a valid count: how many."),
        ({"count": True}, "count takes integer"),
        ({"count": np.int64(1)}, "count takes integer"),
        ({"count": HIGHEST + 1}, "count must be between"),
        ({"share": 0}, "share must be above 0"),
        ({"share": math.nan}, "share must be"),
        ({"share": torch.tensor(0.5)}, "share takes number"),
        ({"size": 1.5}, "size takes text or integer or none"),
        ({"size": "a\0b"}, "size must be text without a NUL character"),
        ({"size": "x" * 5000}, "size must be 4,096 characters or fewer"),
        ({"kind": "c"}, "there is no such kind. Use one of: a, b"),
        ({"mode": "cooked"}, "mode takes raw or done"),
        ({"place": "x"}, "place takes Path or none"),
        ({"steps": (1, "2")}, "steps takes <integer,...>"),
        ({"plain": 1}, "plain takes true or false. Correct plain"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(values: dict[str, Any], words: str):
    with pytest.raises(ConfigError) as caught:
        Sample(**values)
    assert words in str(caught.value)


texts = (
    st.text(st.characters(blacklist_characters="<>,"), min_size=1).map(str.strip).filter(lambda t: t.lower() != "none")
)
HINTS: list[tuple[Any, st.SearchStrategy[Any]]] = [
    (int | None, st.integers() | st.none()),
    (float | None, st.floats(allow_nan=False) | st.none()),
    (bool, st.booleans()),
    (tuple[int, ...] | None, st.lists(st.integers()).map(tuple) | st.none()),
    (Literal["raw", 3] | None, st.sampled_from(["raw", 3, None])),
    (str | None, texts | st.none()),
]


@pytest.mark.parametrize(("hint", "values"), HINTS, ids=[str(hint) for hint, _ in HINTS])
@given(data=st.data())
def test_what_is_written_is_read_again(hint: Any, values: st.SearchStrategy[Any], data: st.DataObject):
    value = data.draw(values)
    found = read(written(value), hint)
    assert found == value and type(found) is type(value)
