"""The options of a model and its engine as data: read, shown and checked for type and bounds without importing torch.

`config.LLMConfig` is the same with what they mean.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from ..core.options import check, option
from ..core.registry import ROUNDS
from ..draft.registry import DrafterConfig

VERIFIERS = ("sample_and_match", "rejection", "block")
AUTO_ROUND = AUTO_DRAFTER = "auto"
MODEL = "embedded model (see `paceline models`), folder, GGUF file or hub name"
DRAFTER = (
    "drafter (see `paceline drafters`) as NAME, NAME:WEIGHTS or NAME,OPTION=VALUE; a folder that `paceline adapt` "
    "made; none; or auto: what `paceline adapt` made for the model, else the zoo's, else suffix"
)
KERNELS = ("auto", "native", "torch")
MAX_RANKS = 64
MAX_SEQUENCES, MAX_BATCH_ROWS = 2**16, 2**20
# More than is useful, and fewer than make an OpenMP runtime end the process because it can start no more.
MAX_THREADS = max(64, 4 * (os.cpu_count() or 1))


@dataclass(frozen=True, kw_only=True)
class LLMOptions:
    """All options of a model and its engine; each field's help states what it may hold."""

    model: str = option(help=MODEL, metavar="NAME|FOLDER|FILE")
    drafter: str | DrafterConfig | None = option(None, help=DRAFTER, metavar="NAME|FOLDER")
    round: str = option(
        AUTO_ROUND,
        help=f"order of drafting and verification: {', '.join(ROUNDS)}, as name,option=value; or auto: by the drafter",
    )
    pipeline: int | str | None = option(
        None,
        help="the target's layers in stages, each in a process of its own: how many, as 4 or 4,cores=<0,1,2,3>",
    )
    tensor_parallel: int = option(
        1,
        help="ranks, processes of this host that each hold a part of every weight: a number that divides the target's "
        "heads and widths",
        minimum=1,
        maximum=MAX_RANKS,
    )
    cluster: str | None = option(
        None,
        help="a Ray cluster for the processes of stages and drafter (docs/cluster.md): auto, the one that this host "
        "has joined, or HOST:PORT of its head; with place=pack, cores=8 or gpus=1 of each",
    )
    verifier: str = option(
        VERIFIERS[0],
        help="sample_and_match, or rejection or block (for drafts that carry q)",
        choices=VERIFIERS,
    )
    budget: int | str | None = option(
        None,
        help="drafted nodes a step: a number (0: plain decoding), or auto, the default",
    )
    dtype: str = option("auto", help="auto (the checkpoint's), bfloat16, float32, float64, int8, q8_0 or q4_0")
    device: str = option("cpu", help="cpu or cuda")
    exact: bool | None = option(
        None,
        help="ids never depend on batch, chunking, prefix hits, preemption or the drafter: by default wherever layers "
        "can ensure it; with no, torch's kernels choose their fastest products",
    )
    kernels: str = option(
        "auto",
        help="auto, native (compiled for this processor; CPU only) or torch",
        choices=KERNELS,
        unknown="there are no such kernels",
    )
    kv_memory: str | int | None = option(None, help="bytes for the K/V pool, such as 2GiB; default: 512MiB or less")
    kv_cache_dtype: str = option(
        "auto",
        help="keys and values: auto (as the activations), or int8 (0.63 of bfloat16's memory with heads of 64)",
        choices=("auto", "int8"),
    )
    max_model_len: int | None = option(
        None, help="most tokens of prompt and output, two tokens or more; default: the model's context", minimum=2
    )
    max_sequences: int = option(64, help="sequences that run at once", minimum=1, maximum=MAX_SEQUENCES)
    max_batch_rows: int = option(
        512, help="rows of one target pass; longer prompts are computed in chunks", minimum=1, maximum=MAX_BATCH_ROWS
    )
    max_prompt_rows: int | str | None = option(
        None,
        help="rows of prompts in a step in which others decode: a number, or auto: as many as make it twice as long. "
        "Default: as many as max_batch_rows",
    )
    threads: int | None = option(None, help="CPU threads; default: torch's choice", minimum=1, maximum=MAX_THREADS)
    applications: dict[str, str] | None = option(
        None,
        help="a trained set that requests may name; repeat it for several",
        flag="--application",
        metavar="NAME=FOLDER",
        takes='applications are folders by name, such as {"sql": "path/to/folder"}',
    )
    learn: str | None = option(
        None,
        help="folder in which token ids of requests are kept, and the drafter learns from them when cores are idle; "
        "default: nothing is kept and nothing is learned",
        metavar="DIR",
    )
    revision: str | None = option(None, help="branch, tag or commit on the hub")
    offline: bool = option(False, help="fetch nothing from the hub")

    def __post_init__(self) -> None:
        check(self)
