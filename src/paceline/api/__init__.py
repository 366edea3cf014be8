"""The public interface: `LLM`, `AsyncLLM`, their configuration and outputs."""
