"""Where a model of some name lies: a local path, or a snapshot from the hub."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..core.errors import ConfigError
from ..core.options import shown
from .files import is_file
from .gguf import gguf_of

log = logging.getLogger(__name__)

CONNECT_S, READ_S = "PACELINE_HUB_CONNECT_S", "PACELINE_HUB_READ_S"  # variables; defaults: 10 and 30
SILENT_S = 300.0  # so long after a time-out no request is sent to the hub: a start looks several names up
_silent_until = 0.0

# All that is fetched from the hub: no code, and no weights in formats that can run code.
HUB_FILES = ("*.safetensors", "*.json", "*.jinja", "tokenizer.model", "*.txt")


def local(name: str) -> Path | None:
    """Return the local folder of this name, if there is one.

    Raises:
        ConfigError: a path that cannot be looked at: too long, no permission, of an unknown user.
    """
    try:
        place = Path(name).expanduser()
        if not place.exists():
            return None
        return gguf_of(place, lambda folder: is_file(folder / "config.json")) or place
    except ConfigError:  # has a complete message
        raise
    except (OSError, RuntimeError, ValueError) as error:
        raise ConfigError(
            f"model {shown(name)}", f"the path cannot be read ({first_line(error)})", "check the path"
        ) from error


def first_line(error: BaseException) -> str:
    """Return the first line of a library's message, cut short and printable."""
    said = (getattr(error, "strerror", None) or str(error)).strip() or type(error).__name__
    return said.splitlines()[0][:300].encode("utf-8", "backslashreplace").decode()


def env_offline() -> bool:
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")


def _seconds(variable: str, default: float) -> float:
    """Return a time limit from the environment."""
    text = os.environ.get(variable, "")
    try:
        value = float(text or default)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e6:
        raise ConfigError(f"{variable}={shown(text)}", "it must be a number of seconds above 0", "correct or unset it")
    return value


@contextmanager
def _limited(connect: float, read: float) -> Iterator[list[Any]]:
    """Bound requests of the hub's client that have no limit, as its look-ups; yield those without an answer."""
    from huggingface_hub import get_session

    session, waiting = get_session(), list[Any]()
    hooks = session.event_hooks

    def begin(request: Any) -> None:
        waiting.append(request)
        own = {phase: limit for phase, limit in request.extensions["timeout"].items() if limit is not None}
        request.extensions["timeout"] = {"connect": connect, "read": read, "write": read, "pool": read} | own

    def end(response: Any) -> None:
        waiting.remove(response.request)

    session.event_hooks = {"request": [*hooks["request"], begin], "response": [*hooks["response"], end]}
    try:
        yield waiting
    finally:
        session.event_hooks = hooks


def from_hub(name: str, revision: str | None, offline: bool) -> Path:
    """Return the folder of a model of the hub: fetched, or from its client's cache.

    A hub that does not answer in time costs one wait: the cache is used then, and for the next `SILENT_S`.

    Raises:
        ConfigError: no such name, or it is in neither.
    """
    global _silent_until
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    if name.startswith(("/", ".", "~")) or name.count("/") > 1:
        raise ConfigError(f"model {shown(name)}", "there is no such folder", "check the path")
    connect, read = _seconds(CONNECT_S, 10.0), _seconds(READ_S, 30.0)
    host, begin = constants.ENDPOINT.partition("//")[2], time.monotonic()
    cached = offline or begin < _silent_until
    try:
        with _limited(connect, read) as waiting:
            try:
                return Path(
                    snapshot_download(name, revision=revision, allow_patterns=[*HUB_FILES], local_files_only=cached)
                )
            finally:
                if waiting and time.monotonic() - begin >= min(connect, read):
                    _silent_until = time.monotonic() + SILENT_S
                    words = "%s did not answer in time (%g s to connect, %g s to read): the hub's cache is used"
                    log.warning(words + " for %g minutes; offline sends none", host, connect, read, SILENT_S / 60)
    except HFValidationError as error:
        wrong = f"neither a folder nor a hub name ({first_line(error)})"
        raise ConfigError(f"model {shown(name)}", wrong, "check the name") from error
    except LocalEntryNotFoundError as error:
        wrong = "not a folder nor an embedded model, not in the local cache, and the hub "
        wrong += "is switched off" if offline else f"({host}) is out of reach"
        remedy = "check the network, or name a local folder; with --offline the hub is not waited for"
        remedy = "download it once without offline" if offline else remedy
        remedy += "; `paceline models` lists the models that are known by name"
        raise ConfigError(f"model {shown(name)}", wrong, remedy) from error
    except Exception as error:  # the client's transport library, and so its errors, differ by version
        raise ConfigError(
            f"model {shown(name)}", f"the hub refuses it ({first_line(error)})", "check name, revision, access"
        ) from error
