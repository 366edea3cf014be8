"""How many tokens a round gives: from the chance that a drafted token is accepted, and back.

The chance is taken to be the same at every depth and independent of what came before (Leviathan et al. 2023, equation
1). Real drafts do a little better near the root and worse far from it. `acceptance.toml` has figures of pairs that were
measured, and what is assumed of others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..core.errors import ConfigError
from ..core.tables import read_table

SIBLINGS = 0.3  # see `Acceptance.siblings`, and the file for where it is from
STEPS = 60  # of a bisection: beyond a float's precision


@dataclass(frozen=True, kw_only=True)
class Acceptance:
    """The acceptance of one drafter, measured or assumed."""

    accept: float  # chance that a token of a chain is accepted, 0 to 1
    source: str
    siblings: float = SIBLINGS  # the w likeliest tokens together miss w^-siblings times as often as the first
    own: bool = True  # of this very pair of target and draft; False: nobody measured it, and another pair's is taken
    layers: int | None = None  # of a draft that was cut out of the target; None: it is not known
    window: int | None = None  # of a sparse draft; None: it is not known
    deepest: int | None = None  # tokens of a draft at most: the streams of a set; None: any number

    def any_of(self, width: int) -> float:
        """Return the probability that one of the ``width`` likeliest tokens is accepted."""
        return 1 - (1 - self.accept) * width**-self.siblings

    def tokens(self, depth: int, width: int = 1) -> float:
        """Return tau, the mean number of tokens of a round, the target's own included.

        Of a chain it is 1 + a + .. + a^depth; ``width`` chains differ in their first tokens alone.
        """
        return 1 + self.any_of(width) * sum(self.accept**n for n in range(depth))


def accept_of(tau: float, depth: int) -> float:
    """Return the acceptance that gives chains this tau: the inverse of `Acceptance.tokens`.

    Raises:
        ConfigError: a tau that chains of this depth cannot have.
    """
    if not 1 <= tau <= depth + 1:
        subject = f"{tau:g} tokens a round at depth {depth}"
        raise ConfigError(subject, "no acceptance gives it", f"give 1 to {depth + 1}")
    low, high = 0.0, 1.0
    for _ in range(STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(middle**n for n in range(depth + 1)) < tau else (low, middle)
    return high


def assumed(target: str, draft: str | None, context: float) -> dict[str, Acceptance]:
    """Return the acceptance of every drafter for a target of that name: the target's own where the pair was measured.

    Args:
        draft: the draft model's name.
        context: tokens that a sequence has; between measured ones tau lies on a line.
    """
    table = read_table("plan/acceptance.toml")
    acceptances = {name: _read(entry, context, measured=False) for name, entry in table["drafter"].items()}
    for pair in table["pair"]:
        if pair["target"] == target and pair.get("draft", draft) == draft:
            acceptances[pair["drafter"]] = _read(pair, context, measured=True)
    return acceptances


def _read(entry: Mapping[str, Any], context: float, measured: bool) -> Acceptance:
    """Read an entry of the table; a tau may be pairs of a context and a number, which numpy interpolates."""
    tau = entry.get("tau")
    if isinstance(tau, list):
        contexts, taus = zip(*tau, strict=True)
        tau = np.interp(context, contexts, taus)
    accept = entry["accept"] if tau is None else accept_of(float(tau), entry["depth"])
    options = {name: entry[name] for name in ("siblings", "layers", "window", "deepest") if name in entry}
    return Acceptance(accept=accept, source=entry["source"], own=measured, **options)
