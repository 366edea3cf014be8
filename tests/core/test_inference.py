"""Inference mode is entered where it is off, and left as it was."""

from __future__ import annotations

import pytest
import torch

from paceline.core.inference import inference


@inference
def doubled(x: float, fail: bool = False) -> torch.Tensor:
    assert torch.is_inference_mode_enabled()
    if fail:
        raise ValueError("no")
    return torch.tensor(2 * x)


def test_the_mode_is_on_inside_and_as_before_outside() -> None:
    assert doubled(2.0).is_inference() and not torch.is_inference_mode_enabled()
    with pytest.raises(ValueError, match="no"):
        doubled(1.0, fail=True)
    assert not torch.is_inference_mode_enabled()
    with torch.inference_mode():
        assert float(doubled(x=3.0)) == 6.0
        assert torch.is_inference_mode_enabled()
    assert doubled.__name__ == "doubled"
