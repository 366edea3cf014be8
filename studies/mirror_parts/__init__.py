"""Parts of the study of Mirror."""

import paceline  # noqa: F401  before torch, whose threads would spin for milliseconds else
