"""Where a model of some name lies: a local path, or a snapshot from the hub."""

from __future__ import annotations

import os
from pathlib import Path

from ..core.errors import ConfigError
from ..core.options import shown
from .files import is_file
from .gguf import gguf_of

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
        wrong = f"the path cannot be read ({first_line(error)})"
        raise ConfigError(f"model {shown(name)}", wrong, "check the path") from error


def first_line(error: BaseException) -> str:
    """Return the first line of a library's message, cut short and printable."""
    text = (getattr(error, "strerror", None) or str(error)).strip() or type(error).__name__
    return text.splitlines()[0][:300].encode("utf-8", "backslashreplace").decode()


def env_offline() -> bool:
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")


def from_hub(name: str, revision: str | None, offline: bool) -> Path:
    """Return the folder of a model of the hub: fetched, or from its client's cache.

    Raises:
        ConfigError: no such name, or it is in neither.
    """
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    if name.startswith(("/", ".", "~")) or name.count("/") > 1:
        raise ConfigError(f"model {shown(name)}", "there is no such folder", "check the path")
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=[*HUB_FILES], local_files_only=offline))
    except HFValidationError as error:
        wrong = f"neither a folder nor a hub name ({first_line(error)})"
        raise ConfigError(f"model {shown(name)}", wrong, "check the name") from error
    except LocalEntryNotFoundError as error:
        state = "is switched off" if offline else f"({constants.ENDPOINT}) is out of reach"
        wrong = f"not a folder nor an embedded model, not in the local cache, and the hub {state}"
        remedy = "download it once without offline" if offline else "check the network, or name a local folder"
        raise ConfigError(f"model {shown(name)}", wrong, f"{remedy}; `paceline models` lists known names") from error
    except Exception as error:  # the client's transport library, and so its errors, differ by version
        wrong = f"the hub refuses it ({first_line(error)})"
        raise ConfigError(f"model {shown(name)}", wrong, "check name, revision, access") from error
