"""``python -m paceline.runtime.begin``: a worker process.

It reads on its standard input what to run, and ends where that is closed. It takes its cores before it imports what
does the work: torch chooses its threads by the cores and the environment that it finds.
"""

from __future__ import annotations

import os
import sys
import threading

from ..core.log import log_to_stderr
from .handshake import BEGIN
from .placement import pin


def main() -> int:
    """Run what the standard input names; return the exit status."""
    log_to_stderr()
    begin = BEGIN.validate_json(sys.stdin.buffer.readline())
    if begin.cores:
        pin(begin.cores)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    from .serving import answer  # what it imports begins on these cores

    return answer(begin)


def _end_with_parent() -> None:
    os.read(sys.stdin.fileno(), 1)
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
