"""The parts of the study of Speculative Streaming, one theme a file; `speculative_streaming.py` beside it runs them."""

import paceline  # noqa: F401  before torch, whose threads would spin for milliseconds else
