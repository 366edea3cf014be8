"""Drafting with streams in the target's own pass (Speculative Streaming)."""
