"""Counter-based noise: a keyed hash, computed where the logits are.

A draw's noise is a function of its key alone: no state, no batch, no clock.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

_MASK64 = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15  # 2^64 / golden ratio: the step of the counter
_MIX = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_LARGEST_BELOW_1 = 1 - 2**-24  # in float32

TARGET, DRAFT, ACCEPT, RESIDUAL = range(4)  # domains: noise for different purposes is independent


def derive_seed() -> int:
    """Return a fresh seed for a request without one; 53 bits, so that any JSON reader keeps it exactly."""
    return secrets.randbits(53)


def _mix(value: int) -> int:
    """Return the finaliser of SplitMix64, a bijection on 64 bits (Steele, Lea and Flood 2014, figure 17)."""
    value = ((value ^ (value >> 30)) * _MIX[0]) & _MASK64
    value = ((value ^ (value >> 27)) * _MIX[1]) & _MASK64
    return value ^ (value >> 31)


def key(*parts: int) -> int:
    """Return a 64-bit key from integers of any size and sign (taken mod 2^64)."""
    mixed = 0
    for part in parts:
        mixed = _mix(((mixed ^ part) + _GAMMA) & _MASK64)
    return mixed


def _signed(value: int) -> int:
    """Return the int64 with the same bits: torch has no full set of unsigned operations."""
    return value - (1 << 64) if value >> 63 else value


@lru_cache(maxsize=16)
def _counters(vocab_size: int, device: torch.device) -> Tensor:
    """Return [V] int64: the counter of each token id, (id + 1) * gamma mod 2^64."""
    return torch.arange(1, vocab_size + 1, dtype=torch.int64, device=device).mul_(_signed(_GAMMA))


def _hash_bits(keys: Sequence[int], vocab_size: int, device: torch.device) -> Tensor:
    """Return [len(keys), V] int64 in [0, 2^63): the SplitMix64 stream of each key, one output a token id.

    The last xor-shift of the finaliser is left out: it only improves low bits, and a float uses the high ones.
    """
    start = torch.tensor([[_signed(key)] for key in keys], dtype=torch.int64, device=device)
    bits = _counters(vocab_size, device) + start
    shifted = torch.empty_like(bits)
    for shift, factor in zip((30, 27), _MIX, strict=True):
        torch.bitwise_right_shift(bits, shift, out=shifted)  # arithmetic; the mask makes it logical
        bits.bitwise_xor_(shifted.bitwise_and_((1 << (64 - shift)) - 1)).mul_(_signed(factor))
    return bits.bitwise_and_((1 << 63) - 1)


def gumbel(keys: Sequence[int], vocab_size: int, device: torch.device) -> Tensor:
    """Return [len(keys), V] float32 standard Gumbel noise, always finite.

    G = -log(E), E = -log(1 - u) exponential. A draw is decided by large G, hence by u near 0, where
    float32 is densest: u has 63 random bits, so the tail that wins is not rounded onto a grid.
    """
    uniform = _hash_bits(keys, vocab_size, device).bitwise_or_(1).to(torch.float32)
    uniform.mul_(2.0**-63).clamp_(max=_LARGEST_BELOW_1)
    return uniform.neg_().log1p_().neg_().log_().neg_()


def uniform(key: int) -> float:
    """Return a double in (0, 1), open at both ends."""
    return ((_mix((key + _GAMMA) & _MASK64) >> 12) + 0.5) * 2.0**-52


def gumbel_rows(keys: Sequence[int], vocab_size: int, device: torch.device) -> list[Tensor]:
    """Return one [V] row a key. On the CPU one by one: a row stays in cache, and no row depends on its neighbours."""
    if device.type == "cpu":
        return [gumbel([key], vocab_size, device)[0] for key in keys]
    return list(gumbel(keys, vocab_size, device).unbind(0))
