"""What users import: `LLM`, `AsyncLLM`, their configuration and outputs."""
