"""Mirror Speculative Decoding: the paper's tables and figures.

    python studies/mirror.py table_1 parameters --out build/mirror                      # nothing runs
    python studies/mirror.py figure_7 traces figure_3b simulated --out build/mirror     # counts, and times nothing
    python studies/mirror.py law figure_3a figure_4 figure_5 --out build/mirror         # on an idle machine
    python studies/mirror.py figure_9 --log RUN/log.jsonl --out build/mirror            # of a training of exits

The functions are in the folder `mirror_parts` beside this file. What came of it: docs/measured/mirror.md.

Source: Mirror Speculative Decoding: Breaking the Serial Barrier in LLM Inference.
"""

from __future__ import annotations

from mirror_parts import counted, modelled, timed
from mirror_parts.common import study

PARTS = (modelled, counted, timed)  # imported: each adds its tables and figures

if __name__ == "__main__":
    study.main()
