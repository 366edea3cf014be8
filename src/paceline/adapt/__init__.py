"""A drafter for a model of one's own, by one command: what `paceline adapt` and learning while serving are made of."""
