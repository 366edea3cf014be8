"""Types of fields that a message between processes carries as memory, and not as JSON; see `runtime.wire`."""

from __future__ import annotations

import math
from typing import Annotated, Any

import torch
from pydantic import GetPydanticSchema, ValidationInfo
from pydantic_core import core_schema
from torch import Tensor


def _read(value: Any, info: ValidationInfo) -> slice | Tensor:
    """Return a slice of its two ends, or a tensor of its dtype, shape and place in the message's memory."""
    if len(value) == 2:
        return slice(*value)
    name, shape, at = value
    kind, count = getattr(torch, name), math.prod(shape)
    flat = torch.frombuffer(info.context, dtype=kind, count=count, offset=at) if count else torch.empty(0, dtype=kind)
    return flat.view(shape)


_READ = GetPydanticSchema(lambda *_: core_schema.with_info_plain_validator_function(_read))
Values = Annotated[Tensor, _READ]
Slots = Annotated[slice | Tensor, _READ]
