"""Checkpoints for hosts that lack them: what a stage needs comes, checked; what is wrong is said in words."""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch

from paceline.core.errors import ConfigError, PacelineError
from paceline.distributed import weights
from paceline.distributed.channels import Line
from paceline.distributed.frames import Codec
from paceline.distributed.sockets import SocketChannel
from paceline.distributed.weights import KINDS, WeightBytes, give, obtain, parts_of
from paceline.distributed.worker import Checkpoint
from paceline.network import hub, loader
from paceline.network.files import RECEIVED, fingerprint, opened

NAME = "nobody/has-this"
OWN = loader.resolve_folder("paceline-small-draft")
FILE = "model.safetensors"


@pytest.fixture
def received(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    """What this process got, into a cache folder of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(hub, "RECEIVED", found := dict[str, Path]())
    monkeypatch.setattr(loader, "RECEIVED", found)
    return found


def transfer(checkpoint: Checkpoint, names: list[str], change: Callable[[Any], Any] = lambda message: message) -> int:
    """Give and obtain over a pair of sockets; pieces sent. ``change`` alters what the giver says."""

    class Changed(Line):
        def send(self, message: Any, timeout: float | None = None) -> None:
            super().send(change(message), timeout)

    own, other = socket.socketpair()
    giver, taker = Changed(SocketChannel(own), Codec(*KINDS)), Line(SocketChannel(other), Codec(*KINDS))
    moved: list[int] = []

    def serve() -> None:
        try:
            give(giver, [checkpoint], lambda: moved.append(1))
        except PacelineError:
            pass  # the taker says what is wrong
        finally:
            giver.close()

    giving = Thread(target=serve)
    giving.start()
    try:
        obtain(taker, names, "10.0.0.2")
    finally:
        taker.close()
        giving.join()
    return len(moved)


def test_a_stage_gets_its_layers_and_the_name_of_the_whole(received: dict[str, Path]) -> None:
    assert transfer(Checkpoint(NAME, OWN, (1, 2)), [NAME]) > 0
    folder = received[NAME]
    assert loader.resolve_folder(NAME) == folder and fingerprint(folder) == fingerprint(OWN)
    assert (folder / "config.json").read_bytes() == (OWN / "config.json").read_bytes()
    assert (folder / FILE).stat().st_size == (OWN / FILE).stat().st_size
    with opened(OWN / FILE, "") as whole, opened(folder / FILE, "") as part:
        names = [*whole.keys()]
        same = {name for name in names if torch.equal(whole.get_tensor(name), part.get_tensor(name))}
        others = {name for name in names if name not in same}
    layer = {name for name in names if ".layers.1." in f".{name}"}
    assert layer and layer <= same and all("layers.0." in name or "layers" not in name for name in others) and others
    assert (folder / FILE).stat().st_blocks * 512 < 0.8 * (OWN / FILE).stat().st_size


def test_what_is_there_is_not_sent_again_unless_it_changed(received: dict[str, Path]) -> None:
    whole = Checkpoint(NAME, OWN)
    first = transfer(whole, [NAME])
    assert first == sum(-(-count // weights.PIECE_BYTES) for _, _, count in parts_of(whole).ranges)
    kept = received.pop(NAME) / FILE
    assert transfer(whole, [NAME]) == 0 and received[NAME] / FILE == kept
    assert kept.read_bytes() == (OWN / FILE).read_bytes()
    with kept.open("r+b") as file:
        file.seek(kept.stat().st_size // 2)
        file.write(b"other bytes")
    received.clear()
    assert transfer(whole, [NAME]) == first and kept.read_bytes() == (OWN / FILE).read_bytes()


def test_what_a_host_has_is_its_own(received: dict[str, Path]) -> None:
    assert transfer(Checkpoint("paceline-small-draft", OWN), ["paceline-small-draft"]) == 0 and not received


def other_bytes(message: Any) -> Any:
    return replace(message, data=message.data + 1) if isinstance(message, WeightBytes) else message


def files_of(*files: tuple[str, int]) -> Callable[[Any], Any]:
    return lambda message: (
        replace(message, files=[*files], ranges=[]) if isinstance(message, weights.Parts) else message
    )


def no_end(message: Any) -> Any:
    return replace(message, ranges=[(0, 0, 2**40)]) if isinstance(message, weights.Parts) else message


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (other_bytes, r"bytes 0 on of \S+ are not what their hash says"),
        (files_of(("../evil.json", 1)), "what is announced is no checkpoint"),
        (files_of(("run.py", 1)), "what is announced is no checkpoint"),
        (files_of(), "what is announced is no checkpoint"),
        (no_end, "what is announced is no checkpoint"),
        (lambda message: weights.Answer(True), r"they did not come \(another message came\)"),
    ],
)
def test_what_is_wrong_is_said(received: dict[str, Path], change: Callable[[Any], Any], said: str) -> None:
    with pytest.raises(ConfigError, match=rf"^weights of {NAME} by broadcast to 10\.0\.0\.2: {said}"):
        transfer(Checkpoint(NAME, OWN), [NAME], change)
    assert not received and not [*OWN.glob(RECEIVED)]


def test_a_full_disk_and_a_host_that_is_gone(received: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="they did not come"):
        transfer(Checkpoint("another", OWN), [NAME])
    usage = weights.shutil.disk_usage("/")
    monkeypatch.setattr(weights.shutil, "disk_usage", lambda place: usage._replace(free=1000))
    with pytest.raises(ConfigError, match=r"its part has \d.* GiB, and .* has room for 0\.0"):
        transfer(Checkpoint(NAME, OWN), [NAME])
