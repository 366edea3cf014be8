"""The parts of the study of Lyanna, one theme a file; `lyanna.py` beside it runs them."""
