"""What each of five papers proposed: the drafter or round, its model and its training recipe."""
