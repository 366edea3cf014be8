"""Where each part runs: channels, workers in processes of their own, and the timeline of what they did.

Nothing here imports torch before tensors are needed, so that a worker can be pinned to its cores first.
"""
