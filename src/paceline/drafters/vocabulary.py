"""Whether the token ids of two models stand for the same strings."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

from ..core.errors import CapabilityError

if TYPE_CHECKING:
    from ..network.decoder import TargetInfo


def tokenizer_mark(tokenizer: Any) -> str:
    """sha256 over a tokenizer's ids and pieces; empty where there is no tokenizer."""
    if tokenizer is None:
        return ""
    pieces = sorted((int(i), piece) for piece, i in tokenizer.get_vocab().items())
    return hashlib.sha256(json.dumps(pieces).encode()).hexdigest()


def check_vocabulary(target: TargetInfo, tokenizer: Any, vocab_size: int, name: str) -> None:
    """Refuse a draft model whose token ids stand for other strings than the target's.

    Raises:
        CapabilityError: names the first ids that differ.
    """
    asked = f"draft model {name!r} for target {target.name!r}"
    remedy = "use a draft that was trained with the target's tokenizer"
    if target.tokenizer is None or tokenizer is None:
        if vocab_size != target.vocab_size:
            raise CapabilityError(asked, f"{vocab_size} tokens against {target.vocab_size}", remedy)
        return
    ours = {i: piece for piece, i in tokenizer.get_vocab().items()}
    theirs = {i: piece for piece, i in target.tokenizer.get_vocab().items()}
    differ = sorted(i for i in ours.keys() | theirs.keys() if ours.get(i) != theirs.get(i))
    if differ:
        shown = ", ".join(f"id {i}: {theirs.get(i)!r} in the target, {ours.get(i)!r} in the draft" for i in differ[:3])
        raise CapabilityError(asked, f"{len(differ)} token ids mean different pieces ({shown})", remedy)
    if vocab_size < len(theirs):
        raise CapabilityError(asked, f"its head has {vocab_size} rows for {len(theirs)} tokens", remedy)
