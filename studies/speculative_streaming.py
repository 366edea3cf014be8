"""Speculative Streaming: the paper's tables and figures, measured on this machine.

    python studies/speculative_streaming.py --quick --out build/quick
    python studies/speculative_streaming.py figure_13 --set paceline-small-streams --tasks sql,gsm8k --out build/streams

The functions, each a table or figure and named as in the paper, are in the folder `streaming` beside this file. Where
one of several settings is to be chosen, half of the prompts choose, and the tables show the other half. What came of
them: docs/measured/speculative-streaming.md.

Source: Speculative Streaming: Efficient and Scalable Speculative Decoding with Multi-Stream Attention.
"""

from __future__ import annotations

from streaming import applications, components, segments, states, sweeps, two_models
from streaming.common import study

PARTS = (
    components,
    sweeps,
    two_models,
    applications,
    states,
    segments,
)  # imported: each adds its figures

if __name__ == "__main__":
    study.main()
