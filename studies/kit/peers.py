"""Other people's engines on the same weights and the same prompts, each in an environment of its own.

A peer is a process: a worker script (`peer_workers`) that runs in the peer's own virtual environment and talks
JSON lines. The clock runs inside the worker, around the engine's own call: the pipe is not charged to the peer.
Between its turns a worker is paused (stopped by a signal): a thread that waits by polling would otherwise slow
down whoever is measured next.

``make peers`` installs them under ``.peers/`` of the checkout; ``$PACELINE_PEERS`` names another folder.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.bench.records import PLAIN, Method
from paceline.core.errors import ConfigError, PacelineError
from paceline.core.options import suggest
from paceline.weights.source import resolve_folder

WORKERS = Path(__file__).resolve().parent / "peer_workers"
LOG_LINES = 12  # of a worker's log, quoted when it fails
KILL_AFTER_S = 5.0


class PeerError(PacelineError):
    """A peer that is not there, or that failed. The text says why, with the last lines of its log."""


@dataclass(frozen=True, kw_only=True)
class PeerMode:
    """One way of decoding that a peer has."""

    draft: bool = False  # needs a draft model
    head: bool = False  # needs a trained head, which a method names: head=FOLDER
    max_batch: int | None = None  # None: any
    options: Mapping[str, Any] = field(default_factory=dict)  # what a method may set -> default; None: the peer's own


@dataclass(frozen=True, kw_only=True)
class PeerKind:
    """One peer, as data."""

    name: str  # as `Method.engine` names it, and its folder under `.peers`
    worker: str  # file in `peer_workers`
    modes: Mapping[str, PeerMode]
    dtypes: tuple[str, ...] = ("bfloat16", "float32")
    needs: tuple[str, ...] = ("venv/bin/python",)  # files in its folder, beside the stamp of a finished build

    @property
    def install(self) -> str:
        """The command that installs it."""
        return f"make peer-{self.name}"


IN_BLOCKS = ("q4_0", "q8_0")  # dtypes of weights that a peer quantises as it converts a checkpoint
ASSISTED = ("num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold")
# vLLM has no number of its own for n-grams; 5 and 2..5 are those of its documentation's example.
HEAD = "head"  # the setting that names a trained head
VLLM_NGRAM = {"num_speculative_tokens": 5, "prompt_lookup_max": 5, "prompt_lookup_min": 2}

PEERS: dict[str, PeerKind] = {
    kind.name: kind
    for kind in (
        PeerKind(
            name="transformers",  # generate()
            worker="transformers_worker.py",
            modes={
                "plain": PeerMode(),
                "assisted": PeerMode(draft=True, max_batch=1, options=dict.fromkeys(ASSISTED)),
                "prompt_lookup": PeerMode(
                    max_batch=1, options={"prompt_lookup_num_tokens": 10, "max_matching_ngram_size": None}
                ),
            },
        ),
        PeerKind(
            name="llama.cpp",  # llama-server
            worker="llama_worker.py",
            modes={
                "plain": PeerMode(),
                "draft-simple": PeerMode(draft=True, options=dict.fromkeys(("draft_tokens", "p_min"))),
                "ngram-mod": PeerMode(options=dict.fromkeys(("n_match", "n_min", "n_max"))),
            },
            dtypes=("bfloat16", "float16", "float32", *IN_BLOCKS),
            needs=("venv/bin/python", "build/bin/llama-server", "build/bin/llama-quantize"),
        ),
        PeerKind(
            name="vllm",  # its build for CPUs
            worker="vllm_worker.py",
            modes={
                "plain": PeerMode(),
                "ngram": PeerMode(options=VLLM_NGRAM),
                "draft_model": PeerMode(draft=True, options={"num_speculative_tokens": 5}),
                "eagle": PeerMode(head=True, options={"num_speculative_tokens": 3, HEAD: None}),
            },
        ),
    )
}


@dataclass(frozen=True, kw_only=True)
class PeerResult:
    """What one call of a peer's engine gave."""

    outputs: list[list[int]]  # new token ids of each prompt
    wall_ms: float  # on the worker's clock
    ttft_ms: list[float] | None = None  # of each prompt; None where the peer does not tell
    waits_ms: list[float] = field(default_factory=list)  # as in `Trial`; empty where the peer does not tell
    arrivals: list[int] = field(default_factory=list)
    drafted: int = 0  # tokens
    accepted: int = 0

    @property
    def passes(self) -> int:
        """Target passes that chose tokens: each gives what it accepts and one token more."""
        return sum(map(len, self.outputs)) - self.accepted


def peers_folder() -> Path:
    """Where peers are installed: ``$PACELINE_PEERS``, or ``.peers`` of the checkout."""
    chosen = os.environ.get("PACELINE_PEERS")
    if chosen:
        return Path(chosen).absolute()
    return Path(__file__).resolve().parents[2] / ".peers"


def kind_of(name: str) -> PeerKind:
    """The peer of that name.

    Raises:
        ConfigError: there is none.
    """
    if name not in PEERS:
        raise ConfigError(f"peer {name!r}", f"there is no peer {name!r}", suggest(name, PEERS, "peer"))
    return PEERS[name]


def available(name: str) -> str | None:
    """Why the peer cannot run on this machine, or None where it can.

    Raises:
        ConfigError: no such peer.
    """
    kind = kind_of(name)
    if os.name != "posix":
        return f"{name} is driven by POSIX signals: run on Linux or macOS"
    home = peers_folder() / name
    if not any(home.glob(".ready-*")):
        return f"{name} is not built: run `{kind.install}` in the checkout"
    missing = [path for path in kind.needs if not (home / path).exists()]
    if missing:
        return f"{name} is incomplete ({missing[0]} is missing): remove {home} and run `{kind.install}`"
    return None


def check(method: Method, *, draft: bool = True, batch: int = 1) -> tuple[PeerKind, str, dict[str, Any]]:
    """The peer, the mode and the mode's options that a method asks for.

    Args:
        method: its engine names the peer, its drafter the mode ("none" is "plain").
        draft: whether there is a draft model.
        batch: the largest number of prompts at once.

    Raises:
        ConfigError: an unknown peer, mode, option or dtype, no draft model or head, too large a batch.
    """
    kind = kind_of(method.engine)
    name = PLAIN if method.plain else method.drafter
    asked = f"method {method.name!r}"
    if name not in kind.modes:
        raise ConfigError(asked, f"{kind.name} has no mode {name!r}", f"choose from {', '.join(kind.modes)}")
    mode = kind.modes[name]
    unknown = sorted(set(method.settings) - set(mode.options))
    if unknown:
        known = ", ".join(mode.options) or "none"
        raise ConfigError(asked, f"{kind.name} {name} has no option {unknown[0]!r}", f"options: {known}")
    if method.dtype not in ("auto", *kind.dtypes):
        raise ConfigError(asked, f"{kind.name} runs {', '.join(kind.dtypes)} here", "choose one of them")
    if mode.draft and not draft:
        raise ConfigError(asked, f"{kind.name} {name} needs a draft model", "name one, or leave the method out")
    if mode.head and not method.settings.get(HEAD):
        raise ConfigError(
            asked, f"{kind.name} {name} needs a trained head", f"name it: {kind.name}/{name};{HEAD}=FOLDER"
        )
    if mode.max_batch is not None and batch > mode.max_batch:
        raise ConfigError(asked, f"{kind.name} {name} takes {mode.max_batch} prompt at a time", "ask for batch 1")
    options = {key: value for key, value in {**mode.options, **method.settings}.items() if value is not None}
    return kind, name, options


class Peer:
    """One worker of one peer in one mode, started and loaded, until `close`.

    A context manager. The worker dies with this process: at the end of its standard input it kills itself and
    its children, and a worker that is paused at that moment is hung up by the system.

    Args:
        method: peer, mode, options and dtype; "auto" is what the checkpoint is stored in.
        model_folder: a Hugging Face folder.
        draft_folder: of the draft model, for the modes that need one.
        threads: as many as the peer may use.
        max_model_len: tokens of prompt and answer together, of one request.
        max_batch: prompts at once.
        timeout_s: for starting and loading, conversion and compilation included.

    Raises:
        PeerError: it cannot be started, took too long, ended, or said what cannot be understood.
        ConfigError: the method asks for what the peer does not have, or names a head that is not there.
    """

    def __init__(
        self,
        method: Method,
        model_folder: str | Path,
        draft_folder: str | Path | None = None,
        *,
        threads: int,
        max_model_len: int,
        max_batch: int = 1,
        timeout_s: float = 600.0,
    ) -> None:
        reason = available(method.engine)
        if reason:
            raise PeerError(reason)
        self.kind, mode, options = check(method, draft=draft_folder is not None, batch=max_batch)
        model, folder = Path(model_folder).resolve(), peers_folder()
        draft = Path(draft_folder).resolve() if self.kind.modes[mode].draft and draft_folder is not None else None
        if self.kind.modes[mode].head:
            draft = resolve_folder(str(options.pop(HEAD))).resolve()
        request = {
            "op": "load",
            "model": str(model),
            "draft": str(draft) if draft else None,
            "mode": mode,
            "options": options,
            "dtype": stored_dtype(model) if method.dtype == "auto" else method.dtype,
            "threads": threads,
            "max_model_len": max_model_len,
            "max_batch": max_batch,
            "home": str(folder / self.kind.name),
            "cache": str(folder),
        }
        self.log = folder / "logs" / f"{self.kind.name}-{mode}.log"
        self._replies: queue.SimpleQueue[bytes] = queue.SimpleQueue()  # lines; empty at the end
        self._paused = False
        self._process = self._spawn(folder / self.kind.name)
        threading.Thread(target=self._listen, daemon=True).start()
        try:
            self.about = self._call(request, timeout_s)  # what the worker says of itself: "version", ...
        except BaseException:
            self.close()
            raise

    @property
    def version(self) -> str:
        """The peer's version."""
        return str(self.about.get("version", ""))

    @property
    def alive(self) -> bool:
        """Whether the worker runs (paused or not)."""
        return self._process.poll() is None

    def run(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        ignore_eos: bool = False,
        timeout_s: float = 600.0,
    ) -> PeerResult:
        """Decode greedily, all prompts submitted at once; a paused worker is resumed first (and stays so)."""
        self.resume()
        request = {
            "op": "generate",
            "prompts": [list(ids) for ids in prompts],
            "max_new_tokens": max_new_tokens,
            "ignore_eos": ignore_eos,
        }
        reply = self._call(request, timeout_s)
        try:
            result = PeerResult(**reply)
            if len(result.outputs) != len(prompts):
                raise ValueError(f"{len(result.outputs)} outputs for {len(prompts)} prompts")
        except (TypeError, ValueError) as error:
            raise self._failed(f"gave a reply that makes no sense ({error})") from error
        return result

    def pause(self) -> None:
        """Stop the worker and all its children where they are: from here on they use no processor time."""
        if self.alive and not self._paused:
            self._signal(signal.SIGSTOP)
            self._paused = True

    def resume(self) -> None:
        """Let a paused worker go on."""
        if self._paused:
            self._signal(signal.SIGCONT)
            self._paused = False

    def close(self) -> None:
        """End the worker and its children; twice is once."""
        stdin = self._process.stdin
        assert stdin is not None
        if stdin.closed:
            return
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            if self.alive and not self._paused:
                stdin.write(b'{"op": "quit"}\n')
                stdin.flush()
                self._process.wait(KILL_AFTER_S)
        self._signal(signal.SIGKILL)  # the group, also where only children are left
        self._process.wait()
        with contextlib.suppress(OSError):
            stdin.close()

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _spawn(self, home: Path) -> subprocess.Popen[bytes]:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("wb") as log:
            return subprocess.Popen(
                [str(home / "venv/bin/python"), "-u", str(WORKERS / self.kind.worker)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=self._environment(home),
                # A group of its own, for signals; but of this session, so that the system hangs it up when this
                # process is gone while it is paused.
                process_group=0,
            )

    def _listen(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                self._replies.put(line)
        self._replies.put(b"")

    def _environment(self, home: Path) -> dict[str, str]:
        """This process's, without what was set for its own threads and modules."""
        own = {"OMP_NUM_THREADS", "MKL_NUM_THREADS", "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "LD_PRELOAD"}
        kept = {key: value for key, value in os.environ.items() if key not in own}
        path = f"{home / 'venv/bin'}{os.pathsep}{kept.get('PATH', os.defpath)}"
        return {**kept, "PATH": path, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}

    def _call(self, request: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        if not self.alive:
            raise self._failed("is not running")
        op = request["op"]
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
            line = self._replies.get(timeout=timeout_s)
        except OSError as error:
            raise self._failed(f"ended during {op!r} ({error})") from error
        except queue.Empty:
            self._signal(signal.SIGKILL)
            self._process.wait()
            raise self._failed(f"did not finish {op!r} within {timeout_s:g} s and was ended") from None
        if not line:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(KILL_AFTER_S)
            raise self._failed(f"ended during {op!r} with status {self._process.poll()}")
        try:
            reply: dict[str, Any] = json.loads(line)
            good = reply.pop("ok")
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise self._failed(f"answered {op!r} with what is not the protocol: {line.rstrip()[:200]!r}") from error
        if not good:
            raise self._failed(f"failed at {op!r}: {reply.get('error', 'no reason given')}")
        return reply

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)

    def _failed(self, what: str) -> PeerError:
        with self.log.open("rb") as log:
            log.seek(max(0, self.log.stat().st_size - 8192))
            lines = log.read().decode(errors="replace").splitlines()
        tail = "\n".join(line[:300] for line in lines[-LOG_LINES:])
        text = f"{self.kind.name} {what}"
        return PeerError(f"{text}\nlast lines of {self.log}:\n{tail}" if tail else text)


def stored_dtype(folder: Path) -> str:
    """The dtype in which a checkpoint is stored, by its ``config.json``.

    Raises:
        ConfigError: the file is missing, broken, or does not say.
    """
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        return str(config.get("dtype") or config["torch_dtype"])
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise ConfigError(str(path), f"does not name the dtype of the weights ({error!r})", "set the dtype") from error
