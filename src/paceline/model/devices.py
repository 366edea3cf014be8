"""Which device each process computes on."""

from __future__ import annotations

ALL_GPUS = "cuda"


def share_devices(device: str, count: int, available: int) -> list[str]:
    """Return a device for each of several processes that compute at the same time.

    ``cuda`` means all ``available`` GPUs, one after the other, and from the first one on again where there are more
    processes; any other name means that device, for all of them.
    """
    if device != ALL_GPUS:
        return [device] * count
    return [f"{ALL_GPUS}:{index % max(1, available)}" for index in range(count)]
