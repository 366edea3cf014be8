"""``python -m paceline.distributed.begin FD``: a worker process.

It is told over an inherited socket what it is, and takes its cores before it imports what does the work: torch chooses
its threads by the cores and the environment that it finds.
"""

from __future__ import annotations

import socket
import sys

from .frames import Codec
from .handshake import LIFE, Begin
from .placement import pin
from .tcp import SocketChannel

PATIENCE_S = 30.0  # for the first message


def begin(fd: int) -> int:
    """Begin as the socket says; the exit status."""
    life = SocketChannel(socket.socket(fileno=fd))
    asked: Begin = Codec(**LIFE).decode(life.receive(PATIENCE_S))
    if asked.cores:
        pin(asked.cores)
    from .serving import main  # what it imports begins on its cores

    return main(asked, life)


if __name__ == "__main__":
    sys.exit(begin(int(sys.argv[1])))
