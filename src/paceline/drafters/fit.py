"""Whether a drafter fits its target: trained weights by name, what they were trained for, and layers that draft."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from ..core.errors import CapabilityError
from ..network.files import check_target, fingerprint

if TYPE_CHECKING:
    from ..network.decoder import TargetInfo
    from ..network.families import DecoderConfig
    from .registry import DrafterContext


def asked(config: Any) -> str:
    """How a message about a drafter with an option ``path`` begins."""
    return f"drafter={config.kind}:{config.path}"


def trained_folder(config: Any, context: DrafterContext) -> Path:
    """The folder that its ``path`` names."""
    return Path(config.path if context.find is None else context.find(config.path))


def check_weights(config: Any, facts: Any, context: DrafterContext) -> None:
    """Refuse what was trained for other weights than the target's.

    Args:
        config: of the drafter.
        facts: what is known of the target that it was trained for: its name ``target`` and its ``fingerprint``.

    Raises:
        CapabilityError: they differ.
    """
    if facts.fingerprint and context.target_folder is not None:
        check_target(asked(config), facts, context.target or "this target", mark=fingerprint(context.target_folder))


def check_shape(config: Any, own: DecoderConfig, trained_for: str, target: TargetInfo) -> None:
    """Refuse layers of another width or vocabulary than the target's.

    Args:
        config: of the drafter.
        own: of its layers.
        trained_for: name of their target, for messages.

    Raises:
        CapabilityError: the first of both that differs.
    """
    facts = SimpleNamespace(target=trained_for, fingerprint="", d_model=own.d_model, vocab_size=own.vocab_size)
    check_target(asked(config), facts, target.name, target)


def check_rotary(wanted: str, c: DecoderConfig, name: str, remedy: str) -> None:
    """Refuse a target whose keys cannot be seen from other positions, or where a layer chooses what it sees.

    Args:
        wanted: how the message begins.
        c, name: of the target.
        remedy: what to do.

    Raises:
        CapabilityError: layers with sliding windows or with rotations of their own, positions that are not rotary.
    """
    if any(window is not None for window in c.windows):
        raise CapabilityError(wanted, f"layers of {name} have sliding windows of their own", remedy)
    if c.ropes:
        raise CapabilityError(wanted, f"layers of {name} rotate keys in different ways", remedy)
    if c.rope is None:
        raise CapabilityError(wanted, f"positions of {name} are learned, not rotary", remedy)
