"""Where a model of some name lies: a local path, or a snapshot from the hub."""

from __future__ import annotations

import os
from pathlib import Path

from ..core.errors import ConfigError
from ..core.options import shown
from .files import is_file
from .gguf import gguf_of

# All that is fetched from the hub: no code, and no weights in formats that can run code.
RECEIVED: dict[str, Path] = {}  # checkpoints that this process got from another host, by the names that they have there
HUB_FILES = ("*.safetensors", "*.json", "*.jinja", "tokenizer.model", "*.txt")


def local(name: str) -> Path | None:
    """The local folder of this name, if there is one.

    Raises:
        ConfigError: a path that cannot be looked at: too long, no permission, of an unknown user.
    """
    try:
        place = Path(name).expanduser()
        if not place.exists():
            return None
        return gguf_of(place, lambda folder: is_file(folder / "config.json")) or place
    except ConfigError:  # says itself what is wrong
        raise
    except (OSError, RuntimeError, ValueError) as error:
        raise ConfigError(
            f"model {shown(name)}", f"it cannot be looked at ({first_line(error)})", "check the path"
        ) from error


def first_line(error: BaseException) -> str:
    """The first line of what a library says, cut short and printable whatever it quotes."""
    said = (getattr(error, "strerror", None) or str(error)).strip() or type(error).__name__
    return said.splitlines()[0][:300].encode("utf-8", "backslashreplace").decode()


def env_offline() -> bool:
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")


def from_hub(name: str, revision: str | None, offline: bool) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    if name.startswith(("/", ".", "~")) or name.count("/") > 1:
        raise ConfigError(f"model {shown(name)}", "there is no such folder", "check the path")
    try:
        return Path(
            snapshot_download(name, revision=revision, allow_patterns=list(HUB_FILES), local_files_only=offline)
        )
    except HFValidationError as error:
        wrong = f"neither a folder nor a hub name ({first_line(error)})"
        raise ConfigError(f"model {shown(name)}", wrong, "check the name") from error
    except LocalEntryNotFoundError as error:
        reason = "it is not in the local cache, and the hub is " + ("switched off" if offline else "out of reach")
        remedy = "download it once without offline" if offline else "check the network, or name a local folder"
        remedy += "; `paceline models` lists the models that are known by name"
        raise ConfigError(
            f"model {shown(name)}", f"not a folder nor an embedded model, and {reason}", remedy
        ) from error
    except Exception as error:  # the client's transport library, and so its errors, differ by version
        raise ConfigError(
            f"model {shown(name)}", f"the hub does not give it ({first_line(error)})", "check name, revision, access"
        ) from error
