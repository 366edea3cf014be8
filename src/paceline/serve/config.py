"""The options of the server."""

from __future__ import annotations

import ipaddress
import os
import socket
import stat
from dataclasses import dataclass
from pathlib import Path

from ..core.errors import ConfigError
from ..core.options import check, option
from .parsers import FAMILIES

TEMPLATES = Path(__file__).parent / "templates"
KEYS_VARIABLE = "PACELINE_API_KEYS"


@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """The address that the server listens on, who may send requests, and the limits of a request."""

    host: str = option("127.0.0.1", help="address to listen at; another than this host's own needs keys")
    port: int = option(8000, help="port to listen at; 0: any free one", minimum=0, maximum=65535)
    served_model_name: str | None = option(
        None, help="the model's name for clients; default: as it was named, of a GGUF the file's name"
    )
    api_key_file: str | None = option(
        None, help=f"file with one key a line that only you may read; or {KEYS_VARIABLE}, keys with commas between"
    )
    no_keys: bool = option(False, help="accept requests from everybody who reaches the address", flag="--no-keys")
    allowed_hosts: list[str] | None = option(
        None, help="a name that clients may call this server by, next to localhost and its address; repeat it"
    )
    chat_template: str | None = option(
        None,
        help="chat template in place of the model's own: hermes, llama3 or mistral, with tools, or a file (Jinja)",
    )
    tool_parser: str = option(
        "auto",
        help="how the model writes tool calls: hermes, llama3, mistral, or auto: as its chat template does",
        choices=("auto", *FAMILIES),
    )
    max_open: int = option(1024, help="most requests at once; more get 429", minimum=1)
    request_s: float = option(3600.0, help="seconds after which a request ends with what it has", above=0.0)
    drain_s: float = option(30.0, help="seconds that requests have to end after SIGTERM", minimum=0.0)
    metrics_names: str = option(
        "paceline",
        help="whose names /metrics has for what vLLM counts, too: paceline or vllm",
        choices=("paceline", "vllm"),
    )

    def __post_init__(self) -> None:
        check(self)
        self.template()

    def template(self) -> str | None:
        """Return the configured chat template.

        Raises:
            ConfigError: it cannot be read.
        """
        if self.chat_template is None:
            return None
        try:
            shipped = self.chat_template in FAMILIES
            file = TEMPLATES / f"{self.chat_template}.jinja" if shipped else Path(self.chat_template)
            return file.read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            subject = f"--chat-template {self.chat_template}"
            remedy = f"name a text file, or one of: {', '.join(FAMILIES)}"
            raise ConfigError(subject, f"it cannot be read ({error})", remedy) from error

    def name_of(self, model: str) -> str:
        """Return a model's name for clients."""
        return self.served_model_name or (Path(model).name if model.lower().endswith(".gguf") else model)

    def listen(self) -> socket.socket:
        """Return a socket that listens.

        Raises:
            ConfigError: the port cannot be had.
        """
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        try:
            return socket.create_server((self.host, self.port), family=family, backlog=1024)
        except (OSError, OverflowError) as error:
            why = getattr(error, "strerror", None) or str(error)
            subject = f"--host {self.host} --port {self.port}"
            remedy = "name an address of this host and a free port"
            raise ConfigError(subject, f"it cannot be had ({why})", remedy) from error

    def keys(self) -> list[str]:
        """Return the keys of which a request must have one; empty: none is needed.

        Raises:
            ConfigError: a file that others may read or without a key, or an address for others without keys.
        """
        keys = [key.strip() for key in os.environ.get(KEYS_VARIABLE, "").split(",") if key.strip()]
        if self.api_key_file is not None:
            keys += _keys_of(Path(self.api_key_file))
        if not keys and not self.no_keys and not _own(self.host):
            remedy = f"give --api-key-file, set {KEYS_VARIABLE}, or add --no-keys"
            raise ConfigError(f"--host {self.host}", "others can reach it, and there are no keys", remedy)
        return [] if self.no_keys else keys


def _own(host: str) -> bool:
    """Return whether only this host can reach an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _keys_of(file: Path) -> list[str]:
    subject = f"--api-key-file {file}"
    try:
        mode, text = file.stat().st_mode, file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(subject, f"it cannot be read ({error})", "name a text file with one key a line") from error
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ConfigError(subject, "others may read it", f"chmod 600 {file}")
    keys = [line.strip() for line in text.splitlines() if line.strip()]
    if not keys:
        raise ConfigError(subject, "it has no key", "write one key a line")
    return keys
