"""Lyanna, with EAGLE-2 and Medusa beside it: the paper's tables and figures, measured on this machine.

    python studies/lyanna.py table_1 --lyanna FULL --without-info A --without-first B --data DATA --out build/lyanna
    python studies/lyanna.py figure_12 --lyanna FULL --data DATA --out build/lyanna

The functions, each a table or figure and named as in the paper, are in the folder `lyanna_parts` beside this file. They
measure trained drafters, which the command line names; what is missing is said before anything runs. How the drafters
are trained, and what came of it: docs/measured/lyanna.md.

Source: Make Every Draft Count: Hidden State based Speculative Decoding (Lyanna).
"""

from __future__ import annotations

from lyanna_parts import acceptance, draft_pass, export, reuse, throughput, trained
from lyanna_parts.common import study

PARTS = (acceptance, reuse, trained, throughput, draft_pass, export)  # imported: each adds its tables and figures

if __name__ == "__main__":
    study.main()
