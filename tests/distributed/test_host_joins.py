"""Ranks on several hosts: the bits of one host, and what a lost one costs."""

from __future__ import annotations

import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from network.test_parallel import answer, build
from torch import Tensor

from paceline.attention import make_backend
from paceline.core.errors import RankLost
from paceline.distributed.channels import ChannelClosed
from paceline.distributed.groups import Store, connect_all
from paceline.distributed.host_joins import HostJoins
from paceline.network.joins import CAPACITY, Joins, RankMemory
from paceline.network.loader import load_model, read_config
from paceline.network.parallel import Ranks, Share


def over_hosts(count: int) -> tuple[Store, list[HostJoins]]:
    store = Store("127.0.0.1")
    return store, [HostJoins(store.member("ranks", rank, count), "127.0.0.1") for rank in range(count)]


def on_one(memory: RankMemory) -> list[Joins]:
    found = [memory.joins() for _ in range(memory.count)]
    for rank, joins in enumerate(found):
        joins.struct.rank = joins.rank = rank
    return found


def answers(folder: Path, all_joins: list[Any], by_outputs: bool, **how: Any) -> list[Tensor]:
    shares = [Share(read_config(folder), rank, len(all_joins), by_outputs) for rank in range(len(all_joins))]
    decoders = [load_model(folder, ranks=Ranks(*pair), **how) for pair in zip(shares, all_joins, strict=True)]
    with ThreadPoolExecutor(len(decoders)) as threads:
        return [*threads.map(answer, decoders)]


@pytest.mark.parametrize(("dtype", "native"), [("float64", False), ("bfloat16", True)])
@pytest.mark.parametrize(("count", "by_outputs"), [(2, False), (2, True), (4, False)])
def test_ranks_on_several_hosts_make_the_bits_of_one_host(
    count: int, by_outputs: bool, dtype: str, native: bool, tmp_path: Path
) -> None:
    build("llama3", tmp_path, vocab_size=202)
    how = {
        "dtype": dtype,
        "native": native,
        "attention": make_backend("reference" if not native else "sdpa", torch.float64),
    }
    memory = RankMemory(count)
    wanted = answers(tmp_path, on_one(memory), by_outputs, **how)
    memory.close()
    store, ends = over_hosts(count)
    found = answers(tmp_path, ends, by_outputs, **how)
    assert wanted[0].std() > 0.1 and all(torch.equal(own, wanted[0]) for own in found)
    assert all(end.struct.collectives > 0 and end.struct.sockets for end in ends)
    del store


def meets(ends: list[HostJoins], values: list[float]) -> list[Any]:
    def one(end: HostJoins, value: float) -> Any:
        try:
            return float(end.sum(torch.full((3,), value))[0])
        except RankLost as error:
            return error

    with ThreadPoolExecutor(len(ends)) as threads:
        return [*threads.map(one, ends, values)]


def test_one_that_does_not_come_is_lost_and_another_epoch_goes_on() -> None:
    store, ends = over_hosts(3)
    assert meets(ends, [1.0, 2.0, 4.0]) == [7.0, 7.0, 7.0]
    for end in ends:
        end.wait(0.3)
    began = time.monotonic()
    assert all(isinstance(said, RankLost) for said in meets(ends[:2], [1.0, 2.0]))
    assert time.monotonic() - began < 5
    for end in ends:
        end.begin(1)
        end.wait(5.0)
    assert meets(ends, [1.0, 2.0, 4.0]) == [7.0, 7.0, 7.0]
    del store


def test_one_that_leaves_ends_the_wait_of_the_others() -> None:
    store, ends = over_hosts(2)
    assert meets(ends, [1.0, 2.0]) == [3.0, 3.0]

    def leave(end: HostJoins) -> None:
        time.sleep(0.2)
        end.begin(1)

    began = time.monotonic()
    with ThreadPoolExecutor(1) as threads:
        left = threads.submit(leave, ends[1])
        assert isinstance(meets(ends[:1], [1.0])[0], RankLost)
        left.result()
    assert time.monotonic() - began < 5
    del store


def test_what_interrupts_a_join_is_raised_where_the_rank_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    store, ends = over_hosts(2)

    def interrupted(*given: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr("paceline.distributed.host_joins.connect_all", interrupted)
    with pytest.raises(RankLost):
        ends[0].sum(torch.ones(3))
    with pytest.raises(KeyboardInterrupt):
        ends[0].begin(1, lost=1)
    ends[0].begin(2, lost=1)
    del store


def test_who_is_no_member_is_not_connected() -> None:
    store = Store("127.0.0.1")
    members = [store.member("ranks", rank, 2) for rank in range(2)]
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(connect_all, members[0], "127.0.0.1", 20.0)
        there = dist.PrefixStore("ranks", dist.TCPStore(store.host, store.port, None, False)).get("here/0")
        port = int(there.split()[-1])
        for hello in (b"", b"short", bytes(32) + b"\x01\0\0\0", there[:32] + b"\x05\0\0\0"):
            with socket.create_connection(("127.0.0.1", port)) as stranger:
                stranger.sendall(hello)
        second = threads.submit(connect_all, members[1], "127.0.0.1", 20.0)
        ends = first.result()[1], second.result()[0]
    assert ends[0].getpeername() == ends[1].getsockname() and ends[0].getsockname()[1] == port
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))
    for end in ends:
        end.close()


def test_one_that_never_comes_is_said() -> None:
    store = Store("127.0.0.1")
    began = time.monotonic()
    with pytest.raises(ChannelClosed, match="127.0.0.1 in group ranks: timed out"):
        connect_all(store.member("ranks", 0, 2), "127.0.0.1", 0.2)
    assert time.monotonic() - began < 5


def test_large_pieces_come_whole() -> None:
    """More than buffers and the kernel hold, so that all ranks send and receive at once."""
    store, ends = over_hosts(3)
    numbers = torch.arange(CAPACITY, dtype=torch.float32)  # of bytes four buffers

    def one(end: HostJoins) -> Tensor:
        return end.sum(numbers * (end.rank + 1))

    with ThreadPoolExecutor(3) as threads:
        found = [*threads.map(one, ends)]
    assert all(torch.equal(own, numbers + 2 * numbers + 3 * numbers) for own in found)
    assert all(end.struct.joins == 4 and end.struct.collectives == 1 for end in ends)
    for end in ends:
        end.close()
    del store
