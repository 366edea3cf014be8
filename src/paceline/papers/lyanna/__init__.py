"""Lyanna: states are drafted first and tokens second, so that a rejected token does not waste the state."""
