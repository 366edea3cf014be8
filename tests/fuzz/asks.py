"""Requests drawn at random: a request is a function of its world and a number."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import pairwise
from typing import Any

from kits.byte_tokens import BYTES_VOCAB, PIECES, SPECIAL, byte_id, byte_tokenizer
from worlds import ADAPTERS, MAX_LEN, SHARED, World

from paceline.core.sampling import SamplingParams

LIBRARY = 60  # requests that neighbouring cases share, so that what is right need not be found anew for each
TEXTS = (
    "the cat",
    "a 😀 and a 日本 é€ ing the the the the",
    "the cat the cat the cat the cat the",
    "ü",
    "ΑΒΓ ab\nab\tab the 👩‍🚀 flag 🇪🇺. ",
)
TORN = (  # bytes that make characters, halves of characters, and none
    (0xF0, 0x9F, 0x98, 0x80),
    (0xE2, 0x82, 0xAC),
    (0xC3, 0xA9),
    (0xED, 0xA0, 0x80),
    (0xFF, 0xC0),
    (0x41, 0x0A),
)


@dataclass(frozen=True, eq=False)
class Expand:
    """One request. ``base`` is what its stop rules were made from, itself a request."""

    world: World
    number: int
    prompt: list[int]
    params: SamplingParams
    text: str | None = None  # of the prompt, where text is given
    application: str | None = None

    @property
    def length(self) -> int:
        """Most tokens of prompt and answer."""
        room = MAX_LEN - len(self.prompt)
        wanted = self.params.max_tokens
        return len(self.prompt) + (room if wanted is None else min(wanted, room))

    def describe(self) -> str:
        """The request as one would write it."""
        changed = {
            name: value
            for name, value in vars(self.params).items()
            if value != SamplingParams.__dataclass_fields__[name].default
        }
        asked = repr(self.text) if self.text is not None else repr(self.prompt)
        return f"world={self.world.name} number={self.number} application={self.application} {changed} prompt={asked}"


Answered = Callable[[Expand], Any]  # the answers of the oracle, from whose text and ids stop rules are made


@lru_cache(maxsize=4000)
def make_ask(world: World, number: int, answered: Answered, shared: bool = False) -> Expand:
    """Request ``number`` of a world.

    Args:
        answered: says what a request without stop rules is answered.
        shared: whether the engines it is for can run applications with streams.
    """
    draw = random.Random(f"{world.name} {number} {shared}")
    text = draw.choice(TEXTS) if world.bytes and draw.random() < 0.3 else None
    prompt = list(byte_tokenizer(strip=False).encode(text)) if text is not None else _prompt(world, number, draw)
    application = _application(shared, draw)
    if text is None and number % LIBRARY and draw.random() < 0.12:
        earlier = make_ask(world, draw.randrange(number - number % LIBRARY, number), answered, shared)
        prompt, application = _going_on(earlier, answered, draw), earlier.application
    params = SamplingParams(**_options(world, len(prompt), draw))
    ask = Expand(world, number, prompt, params, text, application)
    return _with_stops(ask, answered, draw) if draw.random() < 0.5 else ask


def _going_on(earlier: Expand, answered: Answered, draw: random.Random) -> list[int]:
    """A conversation that goes on: an earlier prompt, its answer, and a few ids more."""
    said = [] if earlier.params.seed is None else answered(earlier).samples[0].ids
    return [*earlier.prompt, *said, *draw.choices(range(earlier.world.config.vocab_size), k=3)][: MAX_LEN - 1]


def _application(shared: bool, draw: random.Random) -> str | None:
    if draw.random() < 0.7:
        return None
    return draw.choice([*ADAPTERS, SHARED]) if shared else draw.choice(ADAPTERS)


def _prompt(world: World, number: int, draw: random.Random) -> list[int]:
    """Any ids at all, special ones too; some share a beginning, repeat themselves, or nearly fill the context."""
    size = draw.choice([1, 2, 3, draw.randint(4, 20), draw.randint(4, 20), draw.randint(20, 60), draw.randint(60, 120)])
    if draw.random() < 0.06:
        size = draw.randint(200, 300)
    ids = _ids(world, size, draw)
    if draw.random() < 0.4:
        common = _ids(world, 300, random.Random(f"{world.name} {number // LIBRARY} {draw.randrange(3)}"))
        ids = [*common[: draw.choice([1, 15, 16, 17, 31, 32, 48, 64])], *ids[: max(1, size // 2)]]
    if draw.random() < 0.3:
        ids = (ids[:30] * 5)[: max(len(ids), 20)]
    return ids[: MAX_LEN - 1]


def _ids(world: World, size: int, draw: random.Random) -> list[int]:
    if world.bytes and draw.random() < 0.6:
        return _torn_bytes(size, draw)
    return draw.choices(range(world.config.vocab_size), k=size)


def _torn_bytes(size: int, draw: random.Random) -> list[int]:
    """Characters byte by byte, some of them incomplete, with pieces in between."""
    ids: list[int] = []
    while len(ids) < size:
        whole = [byte_id(b) for b in draw.choice(TORN)]
        ids += whole[: draw.randint(1, len(whole))] if draw.random() < 0.5 else whole
        if draw.random() < 0.3:
            ids.append(len(SPECIAL) + 256 + draw.randrange(len(PIECES)))
    return ids[:size]


def _options(world: World, prompt_len: int, draw: random.Random) -> dict[str, Any]:
    """Every field over its whole range, edges included; most requests have a few that are not the default."""
    vocab = world.config.vocab_size
    count = draw.choice([1, 2, 3, draw.randint(4, 16), draw.randint(8, 24), draw.randint(16, 40)])
    options: dict[str, Any] = {
        "temperature": draw.choice([0, 0, 0, 1, 1, draw.uniform(0.1, 2), draw.choice([1e-4, 1e-3, 50, 1e6])]),
        "seed": draw.choice([0, -1, draw.randrange(2**32), 2**63, -(2**64) - 3, 10**40, draw.randrange(10**6)]),
        "max_tokens": count,
        "ignore_eos": draw.random() < 0.6,
    }
    for name, chance, values in _MENU:
        if draw.random() < chance:
            options[name] = draw.choice(values(vocab, draw))
    if draw.random() < 0.3:
        options["logit_bias"] = _bias(world, draw)
    if draw.random() < 0.15:
        options["min_tokens"] = draw.randint(1, count)
    if draw.random() < 0.04:
        options["seed"] = None
    if draw.random() < 0.12:  # towards the ends
        options |= {"ignore_eos": False, "logit_bias": {i: draw.uniform(1, 7) for i in world.config.eos_ids}}
    if prompt_len > MAX_LEN - 60 and draw.random() < 0.7:
        options |= {"max_tokens": None, "min_tokens": 0}
    return options


Values = Callable[[int, random.Random], Sequence[Any]]
_MENU: tuple[tuple[str, float, Values], ...] = (
    ("top_p", 0.25, lambda v, d: [d.uniform(0.05, 1), 0.9, 0.5, 1e-9, 1 - 1e-9, 5e-324]),
    ("top_k", 0.25, lambda v, d: [1, 2, 5, d.randint(1, v), v - 1, v, v + 1, 10**6, 2**63 - 1, -1]),
    ("min_p", 0.15, lambda v, d: [d.random(), 0.02, 0.1, 1e-30, 1.0]),
    ("repetition_penalty", 0.15, lambda v, d: [1.1, 1.3, 0.7, d.uniform(0.5, 2), 100.0, 0.01, 1e6, 1e-6]),
    ("presence_penalty", 0.15, lambda v, d: [d.uniform(-2, 2), 2, -2, 0.5]),
    ("frequency_penalty", 0.15, lambda v, d: [d.uniform(-2, 2), 2, -2, 1.1]),
    ("n", 0.15, lambda v, d: [2, 3, 4]),
    ("logprobs", 0.15, lambda v, d: [0, 1, 4, v]),
    ("prompt_logprobs", 0.08, lambda v, d: [0, 1, 3, v]),
    ("logprobs_mode", 0.3, lambda v, d: ["processed"]),
    ("echo", 0.1, lambda v, d: [True]),
    ("include_stop_str_in_output", 0.3, lambda v, d: [True]),
    ("skip_special_tokens", 0.2, lambda v, d: [False]),
    ("stop_token_ids", 0.1, lambda v, d: [d.sample(range(v), d.choice([1, 3, v // 2])), []]),
    ("stop", 0.05, lambda v, d: ["~~ never said", ["~", "~~"], []]),
)


def _bias(world: World, draw: random.Random) -> dict[int, float]:
    vocab = world.config.vocab_size
    kind = draw.random()
    if world.bytes and kind < 0.5:  # torn characters, in and out of order
        loud = [byte_id(b) for b in {byte for group in draw.sample(TORN, 3) for byte in group}]
        return {i: draw.uniform(4, 9) for i in loud}
    values = [-100.0, 100.0, 4.0, -1e30, 1e30, 0.0, 5, draw.uniform(-5, 5)]
    return {draw.randrange(vocab): draw.choice(values) for _ in range(draw.choice([1, 3, 10]))}


def _with_stops(ask: Expand, answered: Answered, draw: random.Random) -> Expand:
    """Stop strings and ids out of the answer that the request has without them."""
    if ask.params.seed is None:
        return ask
    free = replace(ask, params=replace(ask.params, stop=None, stop_token_ids=None, include_stop_str_in_output=False))
    sample = draw.choice(answered(free).samples)
    changes: dict[str, Any] = {}
    if sample.text and draw.random() < 0.7:
        changes["stop"] = _stop_strings(sample.text, draw)
    if draw.random() < 0.5:
        changes["stop_token_ids"] = draw.sample(sample.ids, min(len(sample.ids), draw.choice([1, 2])))
    if draw.random() < 0.5:
        changes["include_stop_str_in_output"] = not ask.params.include_stop_str_in_output
    return replace(ask, params=replace(ask.params, **changes))


def _stop_strings(text: str, draw: random.Random) -> Any:
    """Pieces of the text: short and long, overlapping, one inside another, or all but their last character."""
    places = sorted(draw.choices(range(len(text) + 1), k=4))
    found = [text[a : max(b, a + 1)] for a, b in pairwise(places) if text[a : a + 1]]
    found += [piece[1:] for piece in found if len(piece) > 2 and draw.random() < 0.3]
    found += [piece[:-1] + "~" for piece in found if draw.random() < 0.4]
    picked = draw.sample(found, min(len(found), draw.choice([1, 1, 2, 4])))
    return picked[0] if len(picked) == 1 and draw.random() < 0.5 else picked or None


@dataclass(frozen=True)
class Bad:
    """A request that must be refused with ConfigError: at construction, or at submission."""

    options: dict[str, Any] = field(default_factory=dict)
    prompt: Any = (1, 2, 3)
    application: Any = None
    twin: bool = False  # under the name of a request in flight
    late: bool = False  # the last one of a batch whose others are in order

    def describe(self) -> str:
        """What is asked, cut to a line."""
        return f"{self.options} prompt={str(self.prompt)[:60]} application={self.application!r}"


_OPTIONS: tuple[dict[str, Any], ...] = (
    {"temperature": -1},
    {"temperature": float("nan")},
    {"temperature": float("inf")},
    {"temperature": "hot"},
    {"temperature": 1e-5},
    {"temperature": True},
    {"temperature": 1e39},
    {"temperature": 10**300},
    {"top_p": 0},
    {"top_p": 1.5},
    {"top_p": None},
    {"top_k": -2},
    {"top_k": 1.5},
    {"top_k": 10**30},
    {"min_p": -0.1},
    {"min_p": 2},
    {"repetition_penalty": 0},
    {"repetition_penalty": -1},
    {"repetition_penalty": 1e-46},
    {"presence_penalty": 2.5},
    {"frequency_penalty": -3},
    {"logit_bias": {1: float("nan")}},
    {"logit_bias": {1: "a"}},
    {"logit_bias": {1: 1e39}},
    {"logit_bias": {2**70: 1.0}},
    {"logit_bias": {-1: 1.0}},
    {"logit_bias": {10**6: 1.0}},
    {"logit_bias": [1]},
    {"seed": 1.5},
    {"n": 0},
    {"n": "2"},
    {"n": 2**40},
    {"stop": ""},
    {"stop": ["a", ""]},
    {"stop": 5},
    {"stop_token_ids": [10**9]},
    {"stop_token_ids": [-1]},
    {"stop_token_ids": "ab"},
    {"min_tokens": -1},
    {"min_tokens": 20, "max_tokens": 5},
    {"min_tokens": 2**64, "max_tokens": None},
    {"min_tokens": 1, "stop_token_ids": [*range(BYTES_VOCAB)]},
    {"max_tokens": 0},
    {"max_tokens": 2.0},
    {"logprobs": -1},
    {"logprobs": 10**6},
    {"prompt_logprobs": 10**6},
    {"logprobs_mode": "cooked"},
    {"echo": 1},
    {"ignore_eos": None},
)
_PROMPTS: tuple[Any, ...] = (
    (),
    (-1,),
    (1, 10**9),
    (1,) * MAX_LEN,
    (1,) * 5000,
    ("a",),
    (True,),
    (1.0,),
    None,
    5,
    {"prompt_token_ids": None},
)


def make_bad(draw: random.Random) -> Bad:
    """One request that must be refused."""
    kind = draw.random()
    late = draw.random() < 0.5
    if kind < 0.6:
        return Bad(draw.choice(_OPTIONS), late=late)
    if kind < 0.85:
        return Bad(prompt=draw.choice(_PROMPTS), late=late)
    if kind < 0.93:
        return Bad(application=draw.choice(["nobody", "", "SQL"]), late=late)
    return Bad(twin=True)
