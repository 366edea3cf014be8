"""The log of a process of the server's: its own lines on stderr, and of libraries the warnings."""

from __future__ import annotations

import logging
import os

LEVEL_VARIABLE = "PACELINE_LOG_LEVEL"  # for all processes that this one starts


def log_to_stderr() -> None:
    """Write what is logged to stderr, from the level on that the environment names; by default warnings."""
    logging.basicConfig(format="%(message)s")
    logging.getLogger("paceline").setLevel(os.environ.get(LEVEL_VARIABLE, "warning").upper())
