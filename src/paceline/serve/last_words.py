"""A process beside a replica that holds a copy of each stream's connection, and ends these streams where the replica's
own process is killed: a client reads an error event and the end of the answer, not a connection that is cut.

It knows the standard library alone, takes 10 MB, and sleeps until then.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from contextlib import suppress
from itertools import count

MOST_WORDS = 2**16  # bytes of a message
WRITE_S = 1.0  # for a client that does not read


class LastWords:
    """What a replica tells that process.

    Raises:
        OSError, subprocess.CalledProcessError: it cannot be started.
    """

    def __init__(self) -> None:
        self._numbers = count(1)
        self._descriptors: dict[tuple[str, int], int] = {}  # of connections, by who is at their other end
        self._way, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-I", "-S", __file__, str(theirs.fileno())]
        subprocess.run(command, pass_fds=(theirs.fileno(),), start_new_session=True, check=True)
        theirs.close()

    def begin(self, client: tuple[str, int], words: bytes) -> int | None:
        """A stream to a client has begun; its number. None: its connection is not to be found.

        Args:
            client: address and port at the other end of the connection.
            words: events that would end it.
        """
        number = next(self._numbers)
        try:
            if (descriptor := self._descriptor(client)) is None:
                return None
            socket.send_fds(self._way, [b"%d " % number + words], [descriptor])
        except OSError:
            return None
        return number

    def end(self, number: int) -> None:
        """It has ended by itself."""
        with suppress(OSError):
            self._way.send(b"%d" % number)

    def close(self) -> None:
        """No stream is left."""
        self._way.shutdown(socket.SHUT_WR)
        while self._way.recv(MOST_WORDS):  # until that process has ended
            pass
        self._way.close()

    def _descriptor(self, client: tuple[str, int]) -> int | None:
        known = self._descriptors.get(client)
        if known is not None and _peer(known) == client:
            return known
        self._descriptors = {peer: one for one in _open() if (peer := _peer(one)) is not None}
        return self._descriptors.get(client)


def _open() -> list[int]:
    return [int(name) for name in os.listdir("/proc/self/fd")]


def _peer(descriptor: int) -> tuple[str, int] | None:
    """Who is at the other end of a connection; None: it is none."""
    try:
        one = socket.socket(fileno=descriptor)
    except OSError:
        return None
    try:
        internet = one.family in (socket.AF_INET, socket.AF_INET6) and one.type == socket.SOCK_STREAM
        return one.getpeername()[:2] if internet else None
    except OSError:
        return None
    finally:
        one.detach()  # it stays open


def serve(way: socket.socket) -> None:
    """Keep copies, until the replica's end of the way is gone; then end what is left."""
    kept: dict[bytes, tuple[int, bytes]] = {}
    while True:
        told, descriptors, _, _ = socket.recv_fds(way, MOST_WORDS, 1)
        if not told:
            break
        number, _, words = told.partition(b" ")
        if descriptors:
            kept[number] = descriptors[0], words
        elif (found := kept.pop(number, None)) is not None:
            os.close(found[0])
    for descriptor, words in kept.values():
        with suppress(OSError), socket.socket(fileno=descriptor) as one:
            one.settimeout(WRITE_S)
            one.sendall(b"%x\r\n%b\r\n0\r\n\r\n" % (len(words), words))  # HTTP/1.1's form of a part, and of the end


if __name__ == "__main__":
    if os.fork():
        os._exit(0)  # what goes on is no child of the replica's: Ray kills these before it kills the replica
    serve(socket.socket(fileno=int(sys.argv[1])))
