"""A timeline's spans as a picture."""

from __future__ import annotations

from pathlib import Path

import pytest
from kit.timeline import Span, draw

from paceline.core.errors import ConfigError


def test_the_picture(tmp_path: Path):
    pytest.importorskip("matplotlib")
    spans = [Span("stage 0", "draft", 0.0, 2.0), Span("stage 1", "verify", 0.0, 3.0)]
    text = draw(spans, tmp_path / "a.svg", "virtual clock").read_text()
    for words in ("stage 0", "stage 1", "draft", "verify", "ms (virtual clock)"):
        assert f"<!-- {words} -->" in text  # what the letters' outlines stand for
    with pytest.raises(ConfigError, match="no span"):
        draw([], tmp_path / "b.svg")
