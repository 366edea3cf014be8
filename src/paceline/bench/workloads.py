"""What is asked: benchmark prompts, where they come from, and their token ids.

A workload is a list of prompts with its source and licence. Small samples of some come with the package
(``bench/data``, described in its SOURCES.md); every other one, and the full version of these, is read from a
folder. A file holds one JSON record a line, in either form:

- ``{"id", "category", "turns": [user message, ...], "reference": [accepted answer, ...]}``
- ``{"prompt", "completion"}``

Names ending in .gz are gzip-compressed. Other keys are kept as they are.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import random
import tomllib
import zlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from importlib import resources
from itertools import zip_longest
from pathlib import Path
from typing import Any

from ..core.errors import ConfigError
from ..core.options import suggest

FORM = 'one JSON record a line: {"id", "category", "turns": [...], "reference": [...]} or {"prompt", "completion"}'
PACKAGED = "packaged sample"  # where a workload that comes along is read from
_KNOWN_KEYS = {"id", "category", "turns", "reference", "prompt", "completion", "references"}


# -- what a workload is


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One thing to ask: a text, or the user's turns of a conversation."""

    id: str  # unique within the workload
    category: str
    turns: tuple[str, ...]  # at least one, none blank
    reference: tuple[str, ...] = ()  # accepted answers, where the source has any
    extra: dict[str, Any] = field(default_factory=dict)  # further keys of the record


@dataclass(frozen=True, kw_only=True)
class WorkloadFacts:
    """A workload, apart from its prompts."""

    name: str
    title: str
    description: str
    source: str
    licence: str
    chat: bool  # turns go through the chat template, where the model has one; else raw text
    max_new_tokens: int
    long_context: bool = False  # text to be continued: longer contexts are natural, not padding
    file: str = ""  # its full version, in a folder of data
    packaged: bool = False  # a sample is in bench/data
    strata: str = "category"  # the key that a choice of prompts is spread over


@dataclass(frozen=True, kw_only=True)
class Workload(WorkloadFacts):
    """Prompts, and what a report must say about them."""

    origin: str  # "packaged sample", or the file or folder that was read
    prompts: tuple[Prompt, ...]
    total: int  # prompts there were to choose from

    @property
    def categories(self) -> dict[str, int]:
        """Prompts a category."""
        return dict(Counter(prompt.category for prompt in self.prompts))

    @property
    def fingerprint(self) -> str:
        """Hash of ids and turns, in order: two runs of the same prompts have the same one."""
        said = json.dumps([(p.id, p.turns) for p in self.prompts], ensure_ascii=True)
        return hashlib.sha256(said.encode()).hexdigest()[:16]

    def as_dict(self) -> dict[str, Any]:
        """What a report keeps, ready for JSON; ``prompts`` is how many were used, of ``total``."""
        names = ("title", "description", "source", "licence", "origin", "total", "chat", "max_new_tokens")
        found = {name: getattr(self, name) for name in (*names, "long_context", "categories", "fingerprint")}
        return {**found, "prompts": len(self.prompts)}


_CATALOGUE = tomllib.loads((resources.files(__package__) / "workloads.toml").read_text(encoding="utf-8"))
WORKLOADS = {name: WorkloadFacts(name=name, **facts) for name, facts in _CATALOGUE.items()}


# -- finding and loading


def available(folder: str | Path | None = None) -> list[tuple[WorkloadFacts, str | None]]:
    """Every workload that is known by name, and what it would be read from; None: its file is not there.

    Raises:
        ConfigError: ``folder`` is no folder.
    """
    return [
        (entry, str(path) if (path := _in_folder(entry, folder)) else PACKAGED if entry.packaged else None)
        for entry in WORKLOADS.values()
    ]


def load(
    name_or_path: str | Path,
    *,
    folder: str | Path | None = None,
    limit: int | None = None,
    seed: int = 0,
) -> Workload:
    """Prompts by the name of a workload, or from a file.

    A name is read from ``folder`` where its file is there, else from the packaged sample; a path gives the records of
    its file. Records of the form prompt and completion that have the same prompt become one prompt with several
    references.

    Args:
        name_or_path: a name of `WORKLOADS`, or the path of a file.
        folder: where the files of known workloads are.
        limit: prompts to choose, spread evenly over the categories (see `choose`); None: all, in their
            order. More than there are gives all of them: see ``Workload.total``.
        seed: of the choice.

    Raises:
        ConfigError: an unknown name, a missing file, a record that is not of the form, no record, two
            records of one id, or a limit below 1.
    """
    if limit is not None and limit < 1:
        raise ConfigError(f"{limit} prompts of {name_or_path}", "nothing would be asked", "give 1 or more")
    name = name_or_path.lower().replace("-", "_") if isinstance(name_or_path, str) else ""
    entry = WORKLOADS.get(name)
    if entry is not None:
        data, origin = _known_data(entry, folder)
    else:
        path = Path(name_or_path).expanduser()
        if not path.is_file() and name and "/" not in name and "." not in name:
            wrong = "it is neither a known workload nor a file"
            raise ConfigError(f"workload {name_or_path!r}", wrong, suggest(name, WORKLOADS, "workload"))
        if not path.is_file():
            raise ConfigError(f"workload {name_or_path}", "there is no such file", "check the path")
        entry, origin, data = _unnamed(path), str(path), _bytes(path)
    prompts = _parse(data, origin, entry.name)
    chosen = prompts if limit is None else choose(prompts, limit, seed, entry.strata)
    return Workload(**vars(entry), origin=origin, prompts=tuple(chosen), total=len(prompts))


def choose(prompts: Sequence[Prompt], limit: int, seed: int = 0, strata: str = "category") -> list[Prompt]:
    """A reproducible choice, spread evenly over strata.

    Strata are put in a random order, so are the prompts of each; then one prompt of each stratum is taken in
    turn until there are ``limit``. So every prefix of the result is as even as can be, and a smaller choice
    is the beginning of a larger one with the same seed.

    Args:
        strata: ``"category"``, or a key of ``Prompt.extra``; prompts without it go by their category.
    """
    groups: dict[str, list[Prompt]] = {}
    for prompt in sorted(prompts, key=lambda p: p.id):  # what is chosen depends on the ids, not on the file's order
        groups.setdefault(str(prompt.extra.get(strata, prompt.category)), []).append(prompt)
    draw = random.Random(seed).random  # whose sequence Python keeps the same between versions

    def shuffled(items: Iterable[Any]) -> list[Any]:
        return sorted(items, key=lambda _: draw())

    decks = [shuffled(groups[name]) for name in shuffled(sorted(groups))]
    return [prompt for turn in zip_longest(*decks) for prompt in turn if prompt is not None][:limit]


def _in_folder(entry: WorkloadFacts, folder: str | Path | None) -> Path | None:
    """Its file in a folder of data."""
    if folder is None:
        return None
    if not Path(folder).is_dir():
        raise ConfigError(f"data folder {folder}", "there is no such folder", "name a folder of .jsonl files")
    candidates = (Path(folder) / entry.file, Path(folder) / f"{entry.file}.gz")
    return next((path for path in candidates if path.is_file()), None)


def _known_data(entry: WorkloadFacts, folder: str | Path | None) -> tuple[bytes, str]:
    path = _in_folder(entry, folder)
    if path is not None:
        return _bytes(path), str(path)
    if entry.packaged:
        return (resources.files(__package__) / "data" / f"{entry.name}.jsonl").read_bytes(), PACKAGED
    where = f"{folder} has no {entry.file}" if folder else "it does not come with the package"
    raise ConfigError(
        f"workload {entry.name!r}",
        f"{where} (licence: {entry.licence})",
        f"make {entry.file} from {entry.source}, {FORM}, and name its folder with --data",
    )


def _unnamed(path: Path) -> WorkloadFacts:
    name = path.resolve().name.removesuffix(".gz").removesuffix(".jsonl")
    return WorkloadFacts(
        name=name,
        title=name,
        description="prompts from a file",
        source=str(path),
        licence="not stated",
        file=path.name,
        chat=True,
        max_new_tokens=128,
    )


def _bytes(path: Path) -> bytes:
    try:
        data = path.read_bytes()
        return gzip.decompress(data) if path.suffix == ".gz" else data
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError(f"workload file {path}", f"it cannot be read ({error})", "check the file") from error


# -- records


def _parse(data: bytes, origin: str, name: str) -> list[Prompt]:
    """The records of a file; ``name`` makes the ids and the category of records that have none."""
    try:
        lines = data.decode("utf-8-sig").split("\n")  # not splitlines: JSON strings may hold U+2028
    except UnicodeDecodeError as error:
        raise ConfigError(f"workload file {origin}", f"it is not UTF-8 text ({error})", f"give {FORM}") from error
    found: dict[str, tuple[int, Prompt]] = {}  # by id: line, prompt
    by_text: dict[str, str] = {}  # text of a prompt without an id of its own -> the id it was given
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"{origin}, line {number}"
        try:
            record = json.loads(line)
        except ValueError as error:
            raise ConfigError(where, f"it is not JSON ({error})", f"give {FORM}") from error
        if not isinstance(record, dict):
            raise ConfigError(where, f"it is a {type(record).__name__}, not an object", f"give {FORM}")
        prompt = _prompt(record, where, default_id=f"{name}-{number}", default_category=name)
        bare = "prompt" in record and "id" not in record
        twin = by_text.setdefault(prompt.turns[0], prompt.id) if bare else prompt.id
        if twin != prompt.id:  # another reference for a prompt that is there already
            first, known = found[twin]
            found[twin] = (first, replace(known, reference=tuple(dict.fromkeys(known.reference + prompt.reference))))
            continue
        if prompt.id in found:
            raise ConfigError(where, f"id {prompt.id!r} is that of line {found[prompt.id][0]} too", "make ids unique")
        found[prompt.id] = (number, prompt)
    if not found:
        raise ConfigError(f"workload {origin}", "it holds no record", f"give {FORM}")
    return [prompt for _, prompt in found.values()]


def _prompt(record: dict[str, Any], where: str, default_id: str, default_category: str) -> Prompt:
    if "turns" in record and "prompt" in record:
        raise ConfigError(where, "it has both 'turns' and 'prompt'", "keep one of them")
    if "turns" not in record and "prompt" not in record:
        raise ConfigError(where, "it has neither 'turns' nor 'prompt'", f"give {FORM}")
    turns = record["turns"] if "turns" in record else [record["prompt"]]
    if not isinstance(turns, list) or not turns or not all(isinstance(t, str) and t.strip() for t in turns):
        raise ConfigError(where, "'turns' must be a list of texts and 'prompt' a text, none of them blank", "mend it")
    given = record.get("id", default_id)
    if isinstance(given, bool) or not isinstance(given, str | int) or given == "":
        raise ConfigError(where, f"id {given!r} is neither a text nor a whole number", "mend it")
    category = record.get("category", default_category)
    if not isinstance(category, str) or not category:
        raise ConfigError(where, f"category {category!r} is not a text", "mend it, or leave it out")
    extra = {key: value for key, value in record.items() if key not in _KNOWN_KEYS}
    references = _references(record, where)
    return Prompt(id=str(given), category=category, turns=tuple(turns), reference=references, extra=extra)


def _references(record: dict[str, Any], where: str) -> tuple[str, ...]:
    key = next((key for key in ("reference", "references", "completion") if record.get(key) is not None), "")
    # A list a turn is a form too (Spec-Bench's rag has it); which turn an answer belongs to is not kept.
    many = [text for item in _listed(record[key] if key else []) for text in _listed(item)]
    if not all(isinstance(text, str) for text in many):
        raise ConfigError(where, f"{key!r} must be a text or a list of texts", "mend it, or leave it out")
    return tuple(many)


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]
