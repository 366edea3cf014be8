"""What `micro.py` beside it times: plain decoding, the parts of a step, hops between processes."""

import paceline  # noqa: F401  before torch, whose threads would spin for milliseconds else
