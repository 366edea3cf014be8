"""Lyanna: states are drafted first and tokens second, so that a rejected token does not waste the state."""

from .drafter import LyannaConfig as LyannaConfig
from .drafter import LyannaDrafter as LyannaDrafter
