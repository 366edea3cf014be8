"""The parts of the study of Lyanna, one theme a file; `lyanna.py` beside it runs them."""

import paceline  # noqa: F401  before torch, whose threads would spin for milliseconds else
