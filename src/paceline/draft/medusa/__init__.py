"""Drafting by several heads on the target's last state (Medusa)."""

from .drafter import MedusaConfig, MedusaDrafter

__all__ = ["MedusaConfig", "MedusaDrafter"]
