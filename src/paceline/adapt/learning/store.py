"""The token ids of the last requests, a file each in a folder for the user alone; texts are never kept.

One process writes, another reads meanwhile: a file appears whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from zipfile import BadZipFile

import numpy as np

from ...core.errors import ConfigError
from ...train.files import replacing

REQUESTS, PROMPT, ANSWER = 8192, 352, 160  # at most: requests, and tokens of the prompt and of the answer of each


@dataclass(frozen=True, slots=True)
class ServedRequest:
    """A request that was answered."""

    number: int
    prompt: list[int]
    answer: list[int]


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
        for old in (*folder.glob("*.states"), *folder.glob("*.states.part")):  # an earlier version's, of requests
            old.unlink(missing_ok=True)
        self.last = max(self.numbers(), default=0)

    def numbers(self, after: int = 0) -> list[int]:
        """Return the numbers of the requests that are there, oldest first, above ``after``."""
        every = (int(file.stem) for file in self.folder.glob("*.npz"))
        return sorted(number for number in every if number > after)

    def add(self, prompt: Sequence[int], answer: Sequence[int]) -> None:
        """Keep the end of a prompt and the beginning of its answer.

        Raises:
            OSError: it cannot be written.
        """
        self.last += 1
        with replacing(self.folder / f"{self.last}.npz") as fresh, fresh.open("wb") as file:
            np.savez(file, prompt=np.array(prompt[-PROMPT:], "<u4"), answer=np.array(answer[:ANSWER], "<u4"))
        (self.folder / f"{self.last - self.most}.npz").unlink(missing_ok=True)

    def read(self, numbers: Sequence[int]) -> list[ServedRequest]:
        """Return the requests of these numbers; those that were overwritten meanwhile, or are broken, are left out."""
        requests = []
        for number in numbers:
            try:
                with np.load(self.folder / f"{number}.npz") as one:
                    requests.append(ServedRequest(number, one["prompt"].tolist(), one["answer"].tolist()))
            except (OSError, ValueError, KeyError, BadZipFile):
                continue
        return requests
