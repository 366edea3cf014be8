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
import selectors
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..core.errors import ConfigError, PacelineError
from .records import PLAIN, Method

WORKERS = Path(__file__).resolve().parent / "peer_workers"
LOG_LINES = 12  # of a worker's log, quoted when it fails
KILL_AFTER_S = 5.0


class PeerError(PacelineError):
    """A peer that is not there, or that failed. The text says why, with the last lines of its log."""


@dataclass(frozen=True, kw_only=True)
class PeerMode:
    """One way of decoding that a peer has."""

    draft: bool = False  # needs a draft model
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


ASSISTED = ("num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold")
# vLLM has no number of its own for n-grams; 5 and 2..5 are those of its documentation's example.
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
            dtypes=("bfloat16", "float16", "float32"),
            needs=("venv/bin/python", "build/bin/llama-server"),
        ),
        PeerKind(
            name="vllm",  # its build for CPUs
            worker="vllm_worker.py",
            modes={
                "plain": PeerMode(),
                "ngram": PeerMode(options=VLLM_NGRAM),
                "draft_model": PeerMode(draft=True, options={"num_speculative_tokens": 5}),
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
    """Where peers are installed: ``$PACELINE_PEERS``, or ``.peers`` of the checkout, or of the current folder."""
    chosen = os.environ.get("PACELINE_PEERS")
    if chosen:
        return Path(chosen).absolute()
    checkout = Path(__file__).resolve().parents[3]
    home = checkout if (checkout / "pyproject.toml").is_file() else Path.cwd()
    return home / ".peers"


def kind_of(name: str) -> PeerKind:
    """The peer of that name.

    Raises:
        ConfigError: there is none.
    """
    if name not in PEERS:
        raise ConfigError(f"peer {name!r}", "no such peer", f"choose from {', '.join(PEERS)}")
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
        ConfigError: an unknown peer, mode, option or dtype, no draft model, too large a batch.
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
    if mode.max_batch is not None and batch > mode.max_batch:
        raise ConfigError(asked, f"{kind.name} {name} takes {mode.max_batch} prompt at a time", "ask for batch 1")
    options = {key: value for key, value in {**mode.options, **method.settings}.items() if value is not None}
    return kind, name, options


class Peer:
    """One worker of one peer in one mode, from `start` to `close`.

    A context manager. The worker dies with this process: at the end of its standard input it kills itself and
    its children, and a worker that is paused at that moment is hung up by the system.

    Raises:
        PeerError: it cannot be started, took too long, ended, or said what cannot be understood.
        ConfigError: the method asks for what the peer does not have.
    """

    def __init__(self, name: str) -> None:
        self.kind = kind_of(name)
        self.about: dict[str, Any] = {}  # what the worker said of itself: "version", ...
        self.log: Path | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._buffer = b""
        self._paused = False

    @property
    def version(self) -> str:
        """The peer's version, once started."""
        return str(self.about.get("version", ""))

    @property
    def alive(self) -> bool:
        """Whether the worker runs (paused or not)."""
        return self._process is not None and self._process.poll() is None

    def start(
        self,
        method: Method,
        model_folder: str | Path,
        draft_folder: str | Path | None = None,
        *,
        threads: int,
        max_model_len: int,
        max_batch: int = 1,
        timeout_s: float = 600.0,
    ) -> Peer:
        """Start the worker and load the model.

        Args:
            method: mode, options and dtype; "auto" is what the checkpoint is stored in.
            model_folder: a Hugging Face folder.
            draft_folder: of the draft model, for the modes that need one.
            threads: as many as the peer may use.
            max_model_len: tokens of prompt and answer together, of one request.
            max_batch: prompts at once.
            timeout_s: for starting and loading, conversion and compilation included.

        Returns:
            Itself.
        """
        reason = available(self.kind.name)
        if reason:
            raise PeerError(reason)
        kind, mode, options = check(method, draft=draft_folder is not None, batch=max_batch)
        if kind is not self.kind:
            raise ConfigError(f"method {method.name!r}", f"is not one of {self.kind.name}", f"use Peer({kind.name!r})")
        model = Path(model_folder).resolve()
        needs_draft = kind.modes[mode].draft and draft_folder is not None
        self._spawn(peers_folder() / kind.name, mode)
        request = {
            "op": "load",
            "model": str(model),
            "draft": str(Path(draft_folder).resolve()) if needs_draft and draft_folder else None,
            "mode": mode,
            "options": options,
            "dtype": stored_dtype(model) if method.dtype == "auto" else method.dtype,
            "threads": threads,
            "max_model_len": max_model_len,
            "max_batch": max_batch,
            "home": str(peers_folder() / kind.name),
            "cache": str(peers_folder()),
        }
        try:
            self.about = self._call(request, timeout_s)
        except BaseException:
            self.close()
            raise
        return self

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
        process = self._process
        if process is None:
            return
        assert process.stdin is not None and process.stdout is not None
        if self.alive and not self._paused:
            with contextlib.suppress(OSError):
                process.stdin.write(b'{"op": "quit"}\n')
                process.stdin.flush()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(KILL_AFTER_S)
        self._signal(signal.SIGKILL)  # the group, also where only children are left
        process.wait()
        self._process, self._paused, self._buffer = None, False, b""
        for stream in (process.stdin, process.stdout):
            with contextlib.suppress(OSError):
                stream.close()

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _spawn(self, home: Path, mode: str) -> None:
        if self._process is not None:
            raise PeerError(f"{self.kind.name}: this worker was started already; close it first")
        logs = peers_folder() / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        self.log = logs / f"{self.kind.name}-{mode}.log"
        python = home / "venv/bin/python"
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [str(python), "-u", str(WORKERS / self.kind.worker)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=self._environment(home),
                # A group of its own, for signals; but of this session, so that the system hangs it up when this
                # process is gone while it is paused.
                process_group=0,
            )

    def _environment(self, home: Path) -> dict[str, str]:
        """This process's, without what was set for its own threads and modules."""
        own = {"OMP_NUM_THREADS", "MKL_NUM_THREADS", "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "LD_PRELOAD"}
        kept = {key: value for key, value in os.environ.items() if key not in own}
        path = f"{home / 'venv/bin'}{os.pathsep}{kept.get('PATH', os.defpath)}"
        return {**kept, "PATH": path, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}

    def _call(self, request: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        if not self.alive:
            raise self._failed("is not running")
        assert self._process is not None and self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
            line = self._read_line(time.monotonic() + timeout_s)
        except OSError as error:
            raise self._failed(f"ended during {request['op']!r} ({error})") from error
        if line is None:
            self._signal(signal.SIGKILL)
            self._process.wait()
            raise self._failed(f"did not finish {request['op']!r} within {timeout_s:g} s and was ended")
        if not line:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(KILL_AFTER_S)
            raise self._failed(f"ended during {request['op']!r} with status {self._process.poll()}")
        return self._parse(line, request["op"])

    def _parse(self, line: bytes, op: str) -> dict[str, Any]:
        try:
            reply = json.loads(line)
            good = reply.pop("ok")
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise self._failed(f"answered {op!r} with what is not the protocol: {line[:200]!r}") from error
        if not good:
            raise self._failed(f"failed at {op!r}: {reply.get('error', 'no reason given')}")
        return reply

    def _read_line(self, deadline: float) -> bytes | None:
        """The next line; b"" at the end of the stream, None when time is up."""
        assert self._process is not None and self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        with selectors.DefaultSelector() as selector:
            selector.register(descriptor, selectors.EVENT_READ)
            while b"\n" not in self._buffer:
                left = deadline - time.monotonic()
                if left <= 0 or not selector.select(left):
                    return None
                chunk = os.read(descriptor, 1 << 16)
                if not chunk:
                    return b""
                self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, number)

    def _failed(self, what: str) -> PeerError:
        text, tail = f"{self.kind.name} {what}", self._log_tail()
        return PeerError(f"{text}\nlast lines of {self.log}:\n{tail}" if tail else text)

    def _log_tail(self) -> str:
        if self.log is None or not self.log.is_file():
            return ""
        with self.log.open("rb") as log:
            log.seek(max(0, self.log.stat().st_size - 8192))
            lines = log.read().decode(errors="replace").splitlines()
        return "\n".join(line[:300] for line in lines[-LOG_LINES:])


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
