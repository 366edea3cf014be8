"""``python -m paceline.runtime.begin LIFE``: a worker process.

It is told over an inherited socket what it is, and takes its cores before it imports what does the work: torch chooses
its threads by the cores and the environment that it finds. A spare one imports ahead of need, and waits without a beat
for what it is to be.
"""

from __future__ import annotations

import socket
import sys

from ..core.log import log_to_stderr
from .channels import ChannelClosed
from .frames import Codec
from .handshake import LIFE, Begin
from .placement import pin
from .sockets import SocketChannel

PATIENCE_S = 30.0  # for the first message


def begin(life_fd: int) -> int:
    """Begin as the socket says; the exit status."""
    log_to_stderr()
    life = SocketChannel(socket.socket(fileno=life_fd))
    asked: Begin = Codec(*LIFE).decode(life.receive(PATIENCE_S))
    if asked.cores:
        pin(asked.cores)
    from .serving import built, main  # what it imports begins on its cores

    try:
        while asked.waits:
            built(asked)
            asked = Codec(*LIFE).decode(life.receive())
    except ChannelClosed:  # it was not needed
        return 0
    return main(asked, life)


if __name__ == "__main__":
    sys.exit(begin(int(sys.argv[1])))
