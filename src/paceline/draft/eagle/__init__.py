"""EAGLE: a drafter of states that is fed with the tokens it drafts (Li et al. 2024, EAGLE and EAGLE-2)."""

from .drafter import EagleConfig as EagleConfig
from .drafter import EagleDrafter as EagleDrafter
