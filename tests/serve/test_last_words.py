"""Streams of a process that is killed end with an event."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys

import pytest

# Answers three connections with the head of a stream and a part; the first one's stream ends by itself.
SERVER = """
import socket, sys, time
from paceline.serve.last_words import LastWords
last = LastWords()
listening = socket.create_server(("127.0.0.1", 0))
print(listening.getsockname()[1], flush=True)
kept = []
for number in range(3):
    one, peer = listening.accept()
    one.recv(4096)
    one.sendall(b"HTTP/1.1 200 OK\\r\\ntransfer-encoding: chunked\\r\\n\\r\\n5\\r\\nhello\\r\\n")
    kept.append((one, last.begin(peer, b"data: lost %d" % number)))
assert last.begin(("127.0.0.1", 1), b"nobody") is None
one, number = kept[0]
one.sendall(b"0\\r\\n\\r\\n")
last.end(number)
one.close()
print("ready", flush=True)
time.sleep(60)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="it reads /proc")
def test_a_killed_process_says_what_became_of_its_streams() -> None:
    server = subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    port = int(server.stdout.readline())
    clients = [socket.create_connection(("127.0.0.1", port), 30) for _ in range(3)]
    for client in clients:
        client.sendall(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n")
    assert server.stdout.readline() == "ready\n"
    os.kill(server.pid, signal.SIGKILL)
    said = []
    for client in clients:
        text = b""
        while part := client.recv(4096):
            text += part
        said.append(text.partition(b"\r\n\r\n")[2])
    server.wait()
    assert said[0] == b"5\r\nhello\r\n0\r\n\r\n"
    assert said[1:] == [b"5\r\nhello\r\nc\r\ndata: lost %d\r\n0\r\n\r\n" % number for number in (1, 2)]
