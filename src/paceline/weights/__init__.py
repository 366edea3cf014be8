"""Resolve a model's name and read its files: safetensors, GGUF, quantised formats, tokenizers."""
