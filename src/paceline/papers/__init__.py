"""Five papers, a package each: the drafter or round that it proposes, its model and its training recipe."""
