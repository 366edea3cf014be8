"""The paged K/V pool."""
