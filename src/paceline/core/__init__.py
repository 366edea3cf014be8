"""Pure tensors and data: what is being tried, what survives, what is drawn. Imports torch and pydantic only."""
