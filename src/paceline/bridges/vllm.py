"""Our look-ups within vLLM, as drafters of its method ``custom_class``.

    LLM(model=..., speculative_config={
        "method": "custom_class", "model": "paceline.bridges.vllm.Suffix", "num_speculative_tokens": 8})

vLLM makes the class from its config, and requests chains after every step of its older runner; verification is its
own. One's own drafter is a subclass that names it::

    class Mine(paceline.bridges.vllm.Proposer):
        drafter = "follower,depth=3"

Nothing here imports vLLM: it only calls these methods.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Any, ClassVar

import numpy as np

from ..core.errors import ConfigError
from ..draft.registry import DrafterConfig
from .tokens import TokenDrafter

Row = np.ndarray[Any, np.dtype[Any]]  # [T] a text's tokens


class Proposer:
    """Drafts for all requests of one vLLM engine.

    vLLM gives texts without their requests' names, in rows that change places. A row continues the text that it
    begins with, so a request is known by its tokens; two of equal text may change places, which changes no draft.

    Args:
        vllm_config: vLLM's ``VllmConfig``.

    Raises:
        ConfigError: no such drafter, or no ``num_speculative_tokens``.
        CapabilityError: a drafter that reads more than tokens.
    """

    drafter: ClassVar[str | DrafterConfig] = "suffix"

    def __init__(self, vllm_config: Any) -> None:
        self.most = vllm_config.speculative_config.num_speculative_tokens
        if not self.most:
            remedy = 'write "num_speculative_tokens": 8 into speculative_config'
            raise ConfigError("num_speculative_tokens", "the length of drafts is missing", remedy)
        model, scheduler = vllm_config.model_config, vllm_config.scheduler_config
        self.max_len: int = model.max_model_len
        self._drafts = TokenDrafter(self.drafter)
        self._drafts.bind(model.get_vocab_size(), (), self.max_len, scheduler.max_num_seqs)
        self._texts: dict[int, Row] = {}  # by key, as of the last call
        self._rows: dict[int, int] = {}  # row of the last call -> key
        self._keys = count()

    def load_model(self, *_: Any, **__: Any) -> None:
        """Do nothing: vLLM calls it next to loading its target."""

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: Row,
        token_ids_cpu: np.ndarray[Any, np.dtype[Any]],
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """Return [B] a draft for every row, empty for rows still in their prompt or without room.

        Args:
            sampled_token_ids: [B] tokens of the last step; none: the row is in its prompt.
            num_tokens_no_spec: [B] tokens of each text, those included.
            token_ids_cpu: [B, max_model_len] the texts.
            slot_mappings: not needed.
        """
        drafted: dict[int, int] = {}  # row -> its text's key
        rooms: dict[int, int] = {}  # key -> tokens that its draft may have
        left, before = dict(self._texts), self._rows
        for row, said in enumerate(sampled_token_ids):
            length = int(num_tokens_no_spec[row])
            if said and length < self.max_len:
                text = np.asarray(token_ids_cpu[row, :length]).copy()
                key = self._known(text, before.get(row), left)
                if key is None:
                    key = self._begin(text, len(text) - len(said))
                else:
                    self._go_on(key, text, left.pop(key))
                drafted[row], rooms[key] = key, min(self.most, self.max_len - length)
        for key in left:  # of requests that have ended, or wait and come back as new ones
            del self._texts[key]
            self._drafts.close(key)
        self._rows = drafted
        found = self._drafts.chains(rooms) if rooms else {}
        return [found[drafted[row]] if row in drafted else [] for row in range(len(sampled_token_ids))]

    def _known(self, text: Row, before: int | None, left: dict[int, Row]) -> int | None:
        """Return the key of the text that this one continues: its row's last one, else the longest; None: it is new."""
        if before is not None and before in left and _goes_on(text, left[before]):
            return before
        found = [key for key, known in left.items() if _goes_on(text, known)]
        return max(found, key=lambda key: len(left[key]), default=None)

    def _begin(self, text: Row, prompt_len: int) -> int:
        key = next(self._keys)
        self._texts[key] = text
        self._drafts.open(key, text.tolist(), prompt_len, self.max_len)
        return key

    def _go_on(self, key: int, text: Row, known: Row) -> None:
        self._texts[key] = text
        new = text[len(known) :].tolist()
        self._drafts.extend(key, new, len(new) - 1)


def _goes_on(text: Row, known: Row) -> bool:
    """Return whether a text is longer than another, and begins with it."""
    return len(known) < len(text) and np.array_equal(text[: len(known)], known)


class Suffix(Proposer):
    """Suffix decoding over the request and earlier outputs."""

    drafter = "suffix"


class Ngram(Proposer):
    """Prompt look-up."""

    drafter = "ngram"
