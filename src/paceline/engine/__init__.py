"""The engine: scheduling, draft budgets, and the loop that turns requests into tokens."""
