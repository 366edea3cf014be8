"""What tests ask of a K/V pool."""

from __future__ import annotations

from paceline.kv.ledger import Ledger


def cached_prefix(pool: Ledger, tokens: list[int], identity: str | None = None, shareable: int | None = None) -> int:
    """How many leading ``tokens`` a new sequence would find computed; arguments as for `Ledger.open`."""
    return len(tokens) - pool.cost(tokens, len(tokens), identity=identity, shareable=shareable)[0]
