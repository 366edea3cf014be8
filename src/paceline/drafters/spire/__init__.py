"""SPIRe: a draft model for throughput, with a sparse K/V cache, a pruned start and feedback memory."""

from .drafter import SpireConfig as SpireConfig
from .drafter import SpireDrafter as SpireDrafter
