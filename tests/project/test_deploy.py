"""What is deployed with exists: options of `deploy/`, files that the image copies, names in the unit."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from configparser import ConfigParser
from pathlib import Path

from click.core import Context

from paceline.cli import load
from paceline.serve.config import KEYS_VARIABLE, ServeConfig

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE, UNIT = ROOT / "deploy" / "Dockerfile", ROOT / "deploy" / "paceline.service"


def steps() -> dict[str, list[str]]:
    """The Dockerfile's instructions by name, lines joined."""
    text = re.sub(r"^#.*\n", "", DOCKERFILE.read_text(encoding="utf-8"), flags=re.MULTILINE).replace("\\\n", " ")
    found: dict[str, list[str]] = {}
    for line in filter(None, text.splitlines()):
        name, _, rest = line.partition(" ")
        found.setdefault(name, []).append(rest.strip())
    return found


def unit() -> ConfigParser:
    parser = ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read(UNIT, encoding="utf-8")
    return parser


def served(words: list[str]) -> dict[str, object]:
    """The parameters of a command line as `paceline serve` reads them, which it must."""
    assert Path(words[0]).name == "paceline" and words[1] == "serve"
    command = load("serve")
    with Context(command) as context:
        command.parse_args(context, words[2:])
        return dict(context.params)


def test_the_image_starts_the_server_with_options_that_it_has() -> None:
    found = steps()
    [entry], [command] = found["ENTRYPOINT"], found["CMD"]
    given = served([*json.loads(entry), *json.loads(command)])
    assert given["host"] == "0.0.0.0" and [str(given["port"])] == found["EXPOSE"]
    assert KEYS_VARIABLE in DOCKERFILE.read_text(encoding="utf-8")
    check = found["HEALTHCHECK"][0].partition("CMD ")[2]
    compile(json.loads(check)[2], "HEALTHCHECK", "exec")
    assert f":{given['port']}/health" in check


def test_the_image_copies_and_installs_what_is_there() -> None:
    found = steps()
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").split()
    needed = ("pyproject.toml", "constraints.txt", "README.md", "LICENSE", "NOTICE", "src", "zoo")
    assert found["COPY"] == [". /src"] and not set(needed) & set(ignored)
    assert all((ROOT / name).exists() for name in needed)
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    assert set(re.findall(r"/src\[(\w+)\]", " ".join(found["RUN"]))) <= set(extras)
    torch = re.search(r"^TORCH \?= (.*)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert torch is not None and found["ARG"] == [f'TORCH="{torch[1]}"']
    assert found["USER"] == ["paceline"]


def test_the_unit_starts_the_server_and_waits_for_its_drain() -> None:
    service = unit()["Service"]
    given = served(shlex.split(service["ExecStart"]))
    ServeConfig(host=str(given["host"]), port=int(str(given["port"])), drain_s=float(str(given["drain_s"])))
    assert float(service["TimeoutStopSec"]) > float(str(given["drain_s"]))
    assert service["KillMode"] == "mixed"  # its engine must not be told to end while it drains
    assert KEYS_VARIABLE in UNIT.read_text(encoding="utf-8")
