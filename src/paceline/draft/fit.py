"""Whether a drafter fits its target: trained weights by name, what they were trained for, layers that draft, tokens."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar

from ..core.errors import CapabilityError, ConfigError
from ..weights.files import check_target, fingerprint
from ..weights.source import HEAD, MODEL, READERS, reader_of
from ..weights.trained_files import TrainedConfig
from .registry import DrafterConfig, DrafterContext, option

if TYPE_CHECKING:
    from ..model.decoder import TargetInfo
    from ..model.families import DecoderConfig


@dataclass(frozen=True, kw_only=True)
class TrainedDrafterConfig(DrafterConfig):
    """Base of the options of drafters that were trained for their target: where that lies, and whether it fits."""

    subject: ClassVar[str] = "path"
    weights: ClassVar[str] = "path"

    path: str = option("", help="folder, hub name or embedded one of what was trained; none: the zoo's for the model")

    @property
    def label(self) -> str:
        """Return how a message about it begins."""
        return f"drafter={self.kind}:{self.path}"

    def folder(self, context: DrafterContext) -> Path:
        """Return the folder that ``path`` names.

        Raises:
            ConfigError: another drafter reads what it holds.
        """
        folder = Path(self.path if context.find is None else context.find(self.path))
        reader = reader_of(folder)
        if reader not in (None, self.kind) and self.kind in (HEAD, *READERS.values()):
            holds = "a model" if reader == MODEL else f"weights of the drafter {reader!r}"
            raise ConfigError(self.label, f"{folder} holds {holds}", f"write drafter='{reader}:{self.path}'")
        return folder

    def check_weights(self, facts: TrainedConfig, context: DrafterContext) -> None:
        """Refuse what was trained for other weights than the target's.

        Raises:
            CapabilityError: they differ.
        """
        if facts.fingerprint and context.target_folder is not None:
            mark = fingerprint(context.target_folder)
            check_target(self.label, facts, context.target or "this target", mark=mark)

    def check_shape(self, ours: DecoderConfig, trained_for: str, target: TargetInfo) -> None:
        """Refuse layers of another width or vocabulary than the target's.

        Args:
            ours: of its layers.
            trained_for: name of their target, for messages.

        Raises:
            CapabilityError: the first of both that differs.
        """
        facts = SimpleNamespace(target=trained_for, fingerprint="", d_model=ours.d_model, vocab_size=ours.vocab_size)
        check_target(self.label, facts, target.name, target)


def check_rotary(subject: str, c: DecoderConfig, name: str, remedy: str) -> None:
    """Refuse a target whose keys cannot be seen from other positions, or where a layer chooses what it sees.

    Args:
        subject: how the message begins.
        c, name: of the target.
        remedy: what to do.

    Raises:
        CapabilityError: layers with sliding windows or with rotations of their own.
    """
    if any(window is not None for window in c.windows):
        raise CapabilityError(subject, f"layers of {name} have sliding windows of their own", remedy)
    if c.ropes:
        raise CapabilityError(subject, f"layers of {name} rotate keys in different ways", remedy)


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
    what = f"draft model {name!r} for target {target.name!r}"
    remedy = "use a draft that was trained with the target's tokenizer"
    if target.tokenizer is None or tokenizer is None:
        if vocab_size != target.vocab_size:
            raise CapabilityError(what, f"{vocab_size} tokens against {target.vocab_size}", remedy)
        return
    ours = {i: piece for piece, i in tokenizer.get_vocab().items()}
    theirs = {i: piece for piece, i in target.tokenizer.get_vocab().items()}
    differ = sorted(i for i in ours.keys() | theirs.keys() if ours.get(i) != theirs.get(i))
    if differ:
        pairs = ", ".join(f"id {i}: {theirs.get(i)!r} in the target, {ours.get(i)!r} in the draft" for i in differ[:3])
        raise CapabilityError(what, f"{len(differ)} token ids mean different pieces ({pairs})", remedy)
    if vocab_size < len(theirs):
        raise CapabilityError(what, f"its head has {vocab_size} rows for {len(theirs)} tokens", remedy)
