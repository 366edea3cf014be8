"""Tables and figures of SpecPipe, by what is measured."""

import paceline  # noqa: F401  before torch, whose threads would spin for milliseconds else
