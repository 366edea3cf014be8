"""One module for each recipe of a drafter in `draft`."""
