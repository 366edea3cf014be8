"""Which replica a request goes to: pure, so that it is tested without a cluster.

A replica that has computed a prompt's beginning has its K/V. So a session stays where it was, a prompt goes to who
knows most of its beginning, and a short one to who has least to do; nobody gets much more than an even share.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from itertools import count

BLOCK = 64  # characters of a prompt that are known together: about 16 tokens, as many as a page of K/V has
MOST_BLOCKS = 512  # that are looked at
MOST_KNOWN = 2**17  # beginnings that are remembered
EVEN, FEW = 1.25, 16.0  # a replica gets at most so many times the mean, or so many: some have ended, untold yet
PARTS = ("system", "instructions", "tools", "messages", "prompt", "input")  # of a body, in the order of its prompt


@dataclass(frozen=True, slots=True)
class RoutingKey:
    """What of a request decides where it goes."""

    session: str | None
    text: str


def wanted(body: bytes, session: str | None) -> RoutingKey:
    """Read a request's body; one that was cut off is taken as it is.

    Args:
        body: JSON, in the form of any endpoint.
        session: of its ``x-session-id`` header; else the body's ``prompt_cache_key`` is the session.
    """
    try:
        found = json.loads(body)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        return RoutingKey(session, body.decode("latin-1"))
    key = found.get("prompt_cache_key")
    parts = [found[name] for name in PARTS if found.get(name)]
    text = "".join(part if isinstance(part, str) else json.dumps(part) for part in parts)
    return RoutingKey(session or (key if isinstance(key, str) else None) or None, text)


def beginnings(text: str) -> list[bytes]:
    """A hash of each beginning of whole blocks, the longest last."""
    found, before = [], b""
    for at in range(0, min(len(text) - BLOCK + 1, BLOCK * MOST_BLOCKS), BLOCK):
        part = text[at : at + BLOCK].encode("utf-8", "surrogatepass")
        before = blake2b(before + part, digest_size=12).digest()
        found.append(before)
    return found


def _order(key: bytes, replica: str) -> bytes:
    """Rendezvous hashing (Thaler, Ravishankar 1998): a key's replica is the one with the highest; where one leaves,
    only its keys move."""
    return blake2b(key + b"\0" + replica.encode(), digest_size=8).digest()


class Routes:
    """Chooses, and remembers what it chose."""

    def __init__(self) -> None:
        self._known: OrderedDict[bytes, tuple[str, ...]] = OrderedDict()  # replicas that have computed a beginning

    def choose(self, asked: RoutingKey, loads: Mapping[str, float]) -> str:
        """A replica.

        Args:
            asked: the request.
            loads: requests in flight, by replica; those that take none are left out. There is one or more.
        """
        bound = max(FEW, EVEN * (sum(loads.values()) + 1) / len(loads))  # Mirrokni et al. 2016, bounded loads
        free = {name: load for name, load in loads.items() if load < bound} or dict(loads)
        if asked.session is not None:
            key = asked.session.encode("utf-8", "surrogatepass")
            return max(free, key=lambda name: _order(key, name))
        chain = beginnings(asked.text)
        chosen = self._knowing(chain, free)
        if chosen is None:
            if chain:  # several routers choose alike
                chosen = max(free, key=lambda name: _order(chain[0], name))
            else:
                chosen = min(free, key=lambda name: free[name])
        self._remember(chain, chosen)
        return chosen

    def _knowing(self, chain: list[bytes], free: Mapping[str, float]) -> str | None:
        """Of those that know the longest beginning, who has least to do; None: nobody knows one."""
        for one in reversed(chain):
            if holders := [name for name in self._known.get(one, ()) if name in free]:
                return min(holders, key=lambda name: free[name])
        return None

    def _remember(self, chain: list[bytes], chosen: str) -> None:
        for one in chain:
            holders = self._known.pop(one, ())
            self._known[one] = (chosen, *(name for name in holders if name != chosen))[:8]
        while len(self._known) > MOST_KNOWN:
            self._known.popitem(last=False)


def sessions_of(replicas: Iterable[str]) -> dict[str, str]:
    """By replica, a session that belongs there while all of these are free."""
    names = list(replicas)
    found: dict[str, str] = {}
    for number in count():
        if len(found) == len(names):
            break
        session = f"paceline-{number}"
        found.setdefault(Routes().choose(RoutingKey(session, ""), dict.fromkeys(names, 0.0)), session)
    return found


class Loads:
    """Requests in flight, from what replicas say now and then and from what was sent to them since."""

    def __init__(self) -> None:
        self._said: dict[str, object] = {}
        self._since: dict[str, int] = {}

    def now(self, said: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
        """By replica.

        Args:
            said: by replica, what it said last: ``open`` requests, whether it is ``ready``, and ``at``, when that was.
                One of which nothing is known yet takes requests; one that is not ready takes none, if any is.
        """
        for name, words in said.items():
            if self._said.get(name) != words.get("at"):
                self._said[name], self._since[name] = words.get("at"), 0
        ready = {name: words for name, words in said.items() if words.get("ready", True)} or said
        return {name: words.get("open", 0) + self._since.get(name, 0) for name, words in ready.items()}

    def sent(self, name: str) -> None:
        """A request goes there."""
        self._since[name] = self._since.get(name, 0) + 1
