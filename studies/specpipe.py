"""SpecPipe: the paper's tables and figures, nearly all of them in virtual time.

    python studies/specpipe.py --out build/specpipe                        # all of it, minutes
    python studies/specpipe.py figure_11 figure_12 --out build/specpipe    # two of it
    python studies/specpipe.py real figure_9 costs times --out build/timed    # these are timed: on an idle machine
    python studies/specpipe.py figure_13 --measured build/timed --out build/specpipe    # these times on the clock

Tokens, trees, levels in flight, pruning and K/V are real; the clock is computed: stages, links and the source take the
times that are given here, or measured ones. The functions are in the folder `specpipe_parts` beside this file; what
came of them: docs/measured/specpipe.md.

Source: SpecPipe: Accelerating Pipeline Parallelism-based LLM Inference with Speculative Decoding.
"""

from __future__ import annotations

from specpipe_parts import costs, frames, memory, rates, real, requests, single, times
from specpipe_parts.common import study

PARTS = (single, rates, requests, frames, memory, real, costs, times)  # imported: each adds its tables and figures

if __name__ == "__main__":
    study.main()
