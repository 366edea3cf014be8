"""A draft model with streams of its own: the chains that it drafts without them, in fewer passes of it.

Source: Mirror Speculative Decoding, section 3.2.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from ...core.errors import CapabilityError, ConfigError
from ...core.inference import inference
from ...core.tree import TokenTree
from ...draft.base import Drafter, DraftRequest
from ...draft.draft_model import DraftModel, DraftModelConfig
from ...draft.model_sessions import ModelSessions
from ...draft.registry import DrafterContext, option
from ...weights.files import check_target, fingerprint
from .draft_sessions import MAX_CARRIERS, StreamingSessions
from .model import StreamSet, read_config


@dataclass(frozen=True, kw_only=True)
class StreamingDraftConfig(DraftModelConfig):
    """A small language model with streams of its own: the same chains in fewer passes of it."""

    kind: ClassVar[str] = "streaming_draft"

    streams: str = option(help="trained set of streams of the draft model")

    def validate(self) -> None:
        """Refuse trees and drawn chains."""
        super().validate()
        rule = "draft chains: leave out branching, topk and proposes=sampled"
        self.require("streams", self.is_chain and self.proposes != "sampled", rule)

    def build(self, context: DrafterContext) -> DraftModel:
        """Load the model next to the target, and its streams."""
        loaded = self.load(context)
        folder = Path(self.streams) if context.find is None else Path(context.find(self.streams))
        subject = f"drafter={self.kind}:{self.model} with streams={self.streams}"
        if loaded.decoder.config.tracks > 1:
            raise CapabilityError(subject, "it is a draft of tracks, whose layers run whole", "use draft_model")
        shape = read_config(folder)
        if shape.mode != "lossless":
            wrong = "the set was trained in shared mode, which changes the output of the model"
            raise ConfigError(subject, wrong, "use another")
        mark = fingerprint(loaded.folder) if shape.fingerprint and loaded.folder is not None else None
        check_target(subject, shape, loaded.name, loaded.decoder.info(loaded.name), mark)
        stream_set = StreamSet.load(folder, dtype=loaded.decoder.dtype, device=loaded.decoder.device)
        if stream_set.adapters is not None:
            stream_set.adapters.prepare()
        return StreamingDraft(self, loaded, stream_set)


class StreamingDraft(DraftModel):
    """Drafts several tokens of a chain in a pass.

    Args:
        config, loaded: as of `DraftModel`.
        streams: of the draft.
    """

    def __init__(self, config: DraftModelConfig, loaded: Any, streams: StreamSet) -> None:
        super().__init__(config, loaded)
        self.streams = streams

    def _make(self, rows: int) -> ModelSessions:
        """Guesses that were wrong stay until the next cut."""
        gamma = self.streams.config.gamma
        scratch = gamma * min(self._size[0] * rows, MAX_CARRIERS)
        return StreamingSessions(self.streams, *self._parts(rows * (1 + gamma), scratch))

    @inference
    def draft(self, want: DraftRequest) -> list[TokenTree]:
        """Draft chains by sessions."""
        depths = [self._depth(sequence, max_depth) for sequence, _, max_depth in want.rows()]
        return Drafter.draft(self, replace(want, max_depths=depths))
