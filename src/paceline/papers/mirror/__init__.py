"""The mirror round: the target shows at mid-depth what it may emit, and the drafter prepares for it."""
