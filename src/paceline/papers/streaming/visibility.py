"""Which streams a row sees: the visibility rules of multi-stream attention, one function an equation.

Each main row t may own gamma speculative streams. Rows are named by their owner (a main row owns itself) and, among
streams, by their number j from 1 on. Of the main keys both kinds see what main row t sees.

Source: Speculative Streaming, section 2.1.
"""

from __future__ import annotations

from torch import Tensor


def stream_sees(owner: Tensor, stream: Tensor, key_owner: Tensor, key_stream: Tensor) -> Tensor:
    """Return [queries, keys] bool: stream j of main row t sees streams 1 .. j of that row, itself included (eq. 2).

    By the owner and number, int64, of each querying stream [queries] and of those whose keys they are [keys].
    """
    return (owner[:, None] == key_owner) & (key_stream <= stream[:, None])


def main_sees(row: Tensor, key_owner: Tensor) -> Tensor:
    """Return [queries, keys] bool: main row t of ``row`` [queries] int64 sees all streams of its own.

    By the owner of each key [keys] (eq. 3, shared mode alone).
    """
    return row[:, None] == key_owner
