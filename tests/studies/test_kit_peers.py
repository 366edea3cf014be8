"""Peers: the protocol with a small worker that is a real process, what can go wrong, and (full) the real ones."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from kit.peers import PEERS, WORKERS, Peer, PeerError, PeerKind, PeerMode

from paceline.bench.records import Method

sys.path.insert(0, str(WORKERS))  # as the workers themselves find their neighbours

pytestmark = pytest.mark.skipif(os.name != "posix", reason="peers are driven by POSIX signals")

FAKE = f"""
import os, subprocess, sys, time
sys.path.insert(0, {str(WORKERS)!r})
from worker_protocol import serve

class Engine:
    def __init__(self, request):
        if request["mode"] == "broken":
            raise ValueError("no such weights")
        if request["mode"] == "dead":
            print("out of memory, says the library", file=sys.stderr)
            os._exit(3)
        self.child = subprocess.Popen([sys.executable, "-c", "while True: pass"])
        print("a library prints what it likes")
        self.about = {{"version": "1.2", "request": request, "child": self.child.pid,
                       "omp": os.environ.get("OMP_NUM_THREADS"), "pid": os.getpid()}}

    def generate(self, prompts, max_new_tokens, ignore_eos):
        what = prompts[0][0]
        if what == 100:
            raise RuntimeError("prompt too long")
        if what == 101:
            os._exit(7)
        if what == 102:
            time.sleep(60)
        if what == 103:
            return {{"outputs": [], "wall_ms": 1.0}}
        if what == 104:
            return {{"outputs": [[1]], "wall_ms": 1.0, "surprise": 1}}
        outputs = [[ids[-1] + 1 + i for i in range(max_new_tokens)] for ids in prompts]
        return {{"outputs": outputs, "wall_ms": 2.0, "ttft_ms": [1.0], "drafted": 4, "accepted": 2}}

    def close(self):
        self.child.kill()

serve(Engine)
"""
BABBLE = """
import sys
for line in sys.stdin:
    print("loading ... done", flush=True)
"""


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Peer]]:
    """Makes and starts a peer that counts on from the last token of a prompt."""
    modes = {name: PeerMode() for name in ("plain", "broken", "dead")}
    modes |= {"drafting": PeerMode(draft=True, max_batch=1, options={"depth": 3, "width": None})}
    for name, text in (("fake", FAKE), ("babble", BABBLE)):
        (tmp_path / f"{name}.py").write_text(text)
        kind = PeerKind(name=name, worker=str(tmp_path / f"{name}.py"), modes=modes)
        monkeypatch.setitem(PEERS, name, kind)
        (tmp_path / name / "venv/bin").mkdir(parents=True)
        (tmp_path / name / "venv/bin/python").symlink_to(sys.executable)
        (tmp_path / name / ".ready-1").touch()
    (tmp_path / "config.json").write_text('{"dtype": "bfloat16"}')
    monkeypatch.setenv("PACELINE_PEERS", str(tmp_path))
    made: list[Peer] = []

    def start(mode: str = "plain", name: str = "fake", draft: bool = False, **settings: Any) -> Peer:
        method = Method(name="m", engine=name, drafter=mode, settings=settings)
        draft_folder = tmp_path if draft else None
        made.append(Peer(method, tmp_path, draft_folder, threads=1, max_model_len=64, timeout_s=30))
        return made[-1]

    yield start
    for peer in made:
        peer.close()


def wait_for(condition: Callable[[], bool], seconds: float = 15.0) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.02)
    return condition()


def state(pid: int) -> str:
    """As `ps` writes it: R, S, T (stopped), Z (dead, not yet collected); "" where there is no such process."""
    text = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True).stdout
    return text.strip()[:1]


def gone(pid: int) -> bool:
    return state(pid) in ("", "Z")


class TestProtocol:
    def test_answers_carry_ids_and_the_workers_own_clock(self, fake: Callable[..., Peer]) -> None:
        result = fake().run([[1, 2], [7]], 3)
        assert result.outputs == [[3, 4, 5], [8, 9, 10]]
        assert (result.wall_ms, result.ttft_ms, result.drafted, result.accepted) == (2.0, [1.0], 4, 2)
        assert result.passes == 6 - 2

    def test_the_request_says_all_that_the_worker_needs(
        self, fake: Callable[..., Peer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("OMP_NUM_THREADS", "1")  # meant for this process
        peer = fake("drafting", draft=True, depth=5)
        request = peer.about["request"]
        assert request["options"] == {"depth": 5}  # width is left to the peer
        assert (request["model"], request["draft"]) == (str(tmp_path), str(tmp_path))
        assert (request["dtype"], request["threads"], request["max_model_len"]) == ("bfloat16", 1, 64)
        assert peer.about["omp"] is None
        assert peer.version == "1.2"


class TestFailures:
    def test_death_in_a_run_and_after(self, fake: Callable[..., Peer]) -> None:
        peer = fake()
        with pytest.raises(PeerError, match="status 7"):
            peer.run([[101]], 1)
        assert not peer.alive
        with pytest.raises(PeerError, match="is not running"):
            peer.run([[1]], 1)
        peer.close()
        assert wait_for(lambda: gone(peer.about["child"]))  # which its parent could not end any more

    def test_time_out_ends_the_worker_and_its_child(self, fake: Callable[..., Peer]) -> None:
        peer = fake()
        began = time.monotonic()
        with pytest.raises(PeerError, match=r"did not finish 'generate' within 0\.5 s"):
            peer.run([[102]], 1, timeout_s=0.5)
        assert time.monotonic() - began < 30
        assert not peer.alive
        assert wait_for(lambda: gone(peer.about["child"]))
