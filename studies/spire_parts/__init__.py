"""The tables and figures of the study of SPIRe, by what they need."""

import paceline  # noqa: F401  before torch, whose threads would spin for milliseconds else
