"""The mirror round: the target says at mid-depth what it may be about to answer, and the drafter prepares for it."""
