"""SPIRe, with MagicDec and a vanilla draft beside it: the paper's tables and figures.

    python studies/spire.py --out build/spire                                  # what follows from the model alone
    python studies/spire.py table_1 --spire DRAFT --vanilla DRAFT --tasks sql,e2e,gsm8k --data DATA --out build/spire
    python studies/spire.py tau_by_depth --spire DRAFT --drawn sql=FILE --out build/spire

The functions are in the folder `spire_parts` beside this file. Those of `modelled` measure nothing; the others measure
trained drafts, which the command line names. How they are trained, and what came of it: docs/measured/spire.md; what
is modelled: docs/measured/planning.md.

Source: SPIRe: Boosting LLM Inference Throughput with Speculative Decoding.
"""

from __future__ import annotations

from spire_parts import ablations, accepted, answers, held, judged, modelled, throughput, trained
from spire_parts.common import study

# Imported: each adds its tables and figures.
PARTS = (modelled, held, accepted, ablations, trained, throughput, judged, answers)

if __name__ == "__main__":
    study.main()
