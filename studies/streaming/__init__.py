"""The parts of the study of Speculative Streaming, one theme a file; `speculative_streaming.py` beside it runs them."""
