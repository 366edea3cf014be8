"""The last requests, a file each in a folder for the user alone: token ids, and of the newest the target's states.

One process writes, another reads meanwhile: a file appears whole. Texts are never kept. A request's states are those of
the target's last layer that its drafter was shown, so that they need not be computed again: the target's logits after
each token are its head's product with them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np

from ...core.errors import ConfigError

REQUESTS, PROMPT, ANSWER = 8192, 352, 160  # at most: requests, and tokens of the prompt and of the answer of each
WITH_STATES, STATE_BYTES = 640, 256 * 10**6  # more requests than a round learns from; fewer of wide targets


@dataclass(frozen=True, slots=True)
class ServedRequest:
    """A request that was answered."""

    number: int
    prompt: list[int]
    answer: list[int]
    skipped: int = 0  # tokens in front of those that have states
    states: np.ndarray | None = None  # [rows, width] bits of bfloat16


class RequestStore:
    """Requests by number, from 1 on; a new one takes the place of the oldest.

    Args:
        folder: made with mode 0700 where it is missing.
        most: requests that are kept.

    Raises:
        ConfigError: a folder that cannot be made, or that others may read.
    """

    def __init__(self, folder: Path, most: int = REQUESTS) -> None:
        self.folder, self.most, subject = folder, most, f"learn={folder.parent}"
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
            mode = folder.stat().st_mode
        except OSError as error:
            raise ConfigError(subject, f"{folder.name} in it cannot be made ({error})", "choose another") from error
        if mode & 0o077:
            raise ConfigError(subject, f"others may read {folder.name} in it", f"chmod 700 {folder}")
        self.last = max(self.numbers(), default=0)

    def numbers(self, after: int = 0) -> list[int]:
        """Return the numbers of the requests that are there, oldest first, above ``after``."""
        every = (int(file.stem) for file in self.folder.glob("*.npz"))
        return sorted(number for number in every if number > after)

    def add(
        self, prompt: Sequence[int], answer: Sequence[int], start: int = 0, states: np.ndarray | None = None
    ) -> None:
        """Keep the end of a prompt, the beginning of its answer, and states from a request's token ``start`` on.

        Raises:
            OSError: it cannot be written.
        """
        self.last += 1
        if states is not None:
            self._write(f"{self.last}.states", states=states)
            room = max(1, min(WITH_STATES, STATE_BYTES // (2 * states.shape[1] * (PROMPT + ANSWER))))
            (self.folder / f"{self.last - room}.states").unlink(missing_ok=True)
        ids = {"prompt": np.array(prompt[-PROMPT:], dtype="<u4"), "answer": np.array(answer[:ANSWER], dtype="<u4")}
        self._write(f"{self.last}.npz", **ids, skipped=start - max(0, len(prompt) - PROMPT))
        (self.folder / f"{self.last - self.most}.npz").unlink(missing_ok=True)

    def _write(self, name: str, **arrays: Any) -> None:
        fresh = self.folder / f"{name}.part"
        with fresh.open("wb") as file:
            np.savez(file, **arrays)
        fresh.replace(self.folder / name)

    def read(self, numbers: Sequence[int]) -> list[ServedRequest]:
        """Return the requests of these numbers; those that were overwritten meanwhile, or are broken, are left out."""
        requests = []
        for number in numbers:
            try:
                with np.load(self.folder / f"{number}.npz") as one:
                    prompt, answer, skipped = one["prompt"].tolist(), one["answer"].tolist(), int(one["skipped"])
                states = None
                if (file := self.folder / f"{number}.states").is_file():
                    with np.load(file) as arrays:
                        states = arrays["states"]
            except (OSError, ValueError, KeyError, BadZipFile):
                continue
            requests.append(ServedRequest(number, prompt, answer, skipped, states))
        return requests
