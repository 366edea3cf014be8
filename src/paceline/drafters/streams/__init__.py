"""Drafting with streams in the target's own pass (Speculative Streaming)."""

from .drafter import StreamsConfig, StreamsDrafter

__all__ = ["StreamsConfig", "StreamsDrafter"]
