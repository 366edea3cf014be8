"""What studies share: the framework (`study`, `grid`, `halves`), scores, other people's engines, timelines."""

import paceline  # noqa: F401  before torch, whose threads would spin for milliseconds else
