"""Applications from files to answers: loading, every refusal, the Python entry, the command line, the zoo."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kits.tiny import assemble, ids, tiny_adapters, tiny_application, tiny_config, tiny_decoder
from rich.console import Console
from typer.testing import CliRunner

from paceline import LLM, CapabilityError, ConfigError, SamplingParams
from paceline.api.config import LLMConfig
from paceline.api.llm import drafters_of
from paceline.cli import app
from paceline.cli.chat import Conversation
from paceline.model.adapters import linear_shapes
from paceline.model.applications import Application, load_applications
from paceline.model.decoder import Decoder
from paceline.model.families import DecoderConfig
from paceline.papers.streaming.model import StreamConfig, StreamSet
from paceline.weights import zoo
from paceline.weights.files import fingerprint
from paceline.weights.source import read_config, resolve_folder

pytestmark = pytest.mark.timeout(120)
MODEL = "paceline-small"
PROMPT = "Once upon a time there was a little"
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
SMALL = {"max_model_len": 256, "max_sequences": 8}


@pytest.fixture(scope="module")
def target() -> Decoder:
    return tiny_decoder()


def random_streams(shape: DecoderConfig, **changes: Any) -> StreamSet:
    """A random set in shared mode with two streams and no adapters; ``changes`` override its configuration."""
    values: dict[str, Any] = {
        "mode": "shared",
        "gamma": 2,
        "msa_layers": 1,
        "num_layers": shape.num_layers,
        "d_model": shape.d_model,
        "vocab_size": shape.vocab_size,
    }
    return StreamSet.fresh(StreamConfig(**values | changes), linear_shapes(shape))


def make_set(folder: Path, seed: int = 0, **changes: Any) -> Path:
    """A trained set for the embedded target, of random adapters; ``changes`` override its configuration."""
    place = resolve_folder(MODEL)
    made = tiny_adapters(read_config(place), seed=seed, size=0.5, dtype=torch.float32)
    made.config = replace(made.config, target=MODEL, **{"fingerprint": fingerprint(place)} | changes)
    made.save(folder)
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    place = tmp_path_factory.mktemp("applications")
    return {name: str(make_set(place / name, seed)) for seed, name in enumerate(("sql", "prose"))}


@pytest.fixture(scope="module")
def llm(folders: dict[str, str]) -> LLM:
    return LLM(MODEL, applications=folders, drafter="ngram", budget=3, exact=True, **SMALL)


def load(folder: Path, name: str = "sql", **names: Any) -> dict[str, Application]:
    place = resolve_folder(MODEL)
    decoder = SimpleNamespace(config=read_config(place), dtype=torch.float32, device="cpu", exact=False, stack=None)
    return load_applications({name: folder}, decoder, MODEL, place)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "wrong"),
    [
        ({"fingerprint": "0" * 64}, "whose weights differ"),
        ({"num_layers": 13}, "num_layers=13, paceline-small has 12"),
        ({"d_model": 128}, "d_model=128"),
        ({"vocab_size": 17}, "vocab_size=17"),
    ],
)
def test_a_set_for_another_target_is_refused(changes: dict[str, Any], wrong: str, tmp_path: Path) -> None:
    with pytest.raises(CapabilityError, match=wrong):
        load(make_set(tmp_path / "set", **changes))


def test_adapters_of_other_widths_are_refused(tmp_path: Path) -> None:
    shape = read_config(resolve_folder(MODEL))
    made = tiny_adapters(replace(shape, d_ff=shape.d_ff // 2), dtype=torch.float32)
    made.save(tmp_path)
    with pytest.raises(CapabilityError, match="layer 0, up"):
        load(tmp_path)


def test_a_lossless_set_is_no_application(tmp_path: Path) -> None:
    shape = read_config(resolve_folder(MODEL))
    random_streams(shape, mode="lossless").save(tmp_path)
    with pytest.raises(ConfigError, match="lossless mode.*drafter='streams:"):
        load(tmp_path)


def test_missing_and_broken_files_are_refused(folders: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="gone"):
        load(tmp_path / "gone")
    folder = make_set(tmp_path / "set")
    (folder / "streams.safetensors").write_bytes(b"12345")
    with pytest.raises(ConfigError, match="truncated or not safetensors"):
        load(folder)
    (folder / "streams.safetensors").unlink()
    with pytest.raises(ConfigError, match="holds no streams.safetensors"):
        load(folder)


def test_the_serial_round_refuses_what_needs_streams(target: Decoder) -> None:
    made = random_streams(tiny_config())
    with pytest.raises(CapabilityError, match="'sql' in round 'serial'.*the drafter that its files are for"):
        assemble(decoder=target, applications=[tiny_application("sql", target, made)])


def test_one_for_all_or_one_a_prompt(llm: LLM) -> None:
    plain = ids(llm.generate([PROMPT, "def add("], GREEDY))
    both = ids(llm.generate([PROMPT, "def add("], GREEDY, application="sql"))
    assert plain[0] != both[0] and plain[1] != both[1]
    mixed = llm.generate([PROMPT, PROMPT, "def add("], GREEDY, application=["sql", None, "prose"])
    assert [output.application for output in mixed] == ["sql", None, "prose"]
    assert ids(mixed)[:2] == [both[0], plain[0]]
    assert ids(mixed)[2] not in (plain[1], both[1])
    with pytest.raises(ConfigError, match="2 applications for 1 prompts"):
        llm.generate(PROMPT, GREEDY, application=["sql", "prose"])


def test_an_unknown_application_is_refused_before_anything_runs(llm: LLM) -> None:
    for ask in (
        lambda: llm.generate([PROMPT] * 2, GREEDY, application=["sql", "nosuch"]),
        lambda: llm.stream(PROMPT, GREEDY, "nosuch"),
        lambda: llm.chat([{"role": "user", "content": "hi"}], GREEDY, application="nosuch"),
    ):
        with pytest.raises(ConfigError, match="'nosuch'.*prose, sql"):
            ask()
        assert not llm.engine.busy
    with pytest.raises(ConfigError, match="Load it"):
        LLM(MODEL, share=llm, exact=True, **SMALL).generate(PROMPT, GREEDY, application="sql")


def test_k_and_v_stay_with_their_application(llm: LLM) -> None:
    prompt = {"prompt_token_ids": list(range(200, 240))}
    cached = [llm.generate(prompt, GREEDY, application=name)[0].stats.cached_prompt_tokens for name in ("sql", "prose")]
    again = llm.generate(prompt, GREEDY, application="sql")[0].stats.cached_prompt_tokens
    assert cached == [0, 0] and again == 32


@pytest.fixture(scope="module")
def fast(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A set for the embedded target with two streams of its own."""
    folder = tmp_path_factory.mktemp("streams") / "fast"
    made = random_streams(read_config(resolve_folder(MODEL)))
    made.config = replace(made.config, fingerprint=fingerprint(resolve_folder(MODEL)))
    made.save(folder)
    return str(folder)


def test_streams_of_an_application_draft_for_it(folders: dict[str, str], fast: str) -> None:
    asked: dict[str, Any] = {"applications": {**folders, "fast": fast}, "exact": True, **SMALL}
    drafting = LLM(MODEL, drafter="streams,k=2", budget=6, **asked)
    plain = LLM(MODEL, share=drafting, drafter="streams", budget=0, **asked)
    names = ["fast", "sql", None, "fast"]
    prompts = [PROMPT, PROMPT, PROMPT, "def add("]
    together = drafting.generate(prompts, GREEDY, application=names)
    alone = [plain.generate(p, GREEDY, application=name)[0] for p, name in zip(prompts, names, strict=True)]
    assert ids(together) == ids(alone)
    assert [output.stats.drafted > 0 for output in together] == [True, False, False, True]
    # Main rows of a shared set attend to its streams: the reference is the base model with that set alone.
    base = LLM(MODEL, drafter="streams", budget=0, **{**asked, "applications": {"fast": fast}})
    fast_ids, sql_ids, plain_ids = ids(together)[:3]
    assert fast_ids == ids(base.generate([PROMPT], GREEDY, application="fast"))[0]
    assert sql_ids not in (fast_ids, plain_ids)  # the adapters of "sql" are its own


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("NO_COLOR", "1")
    return lambda *args: CliRunner().invoke(app, list(args))


def flags(folders: dict[str, str]) -> list[str]:
    pairs = [f"--application={name}={folder}" for name, folder in folders.items()]
    return ["generate", "--drafter", "none", "--exact", "--ignore-eos", "--max-tokens", "12", *pairs]


def test_generate_answers_as_it_is_told(cli: Callable[..., Any], folders: dict[str, str], llm: LLM) -> None:
    for name, application in (("sql", "sql"), ("base", None)):
        result = cli(*flags(folders), "--json", "-p", PROMPT, "--as", name)
        assert result.exit_code == 0, result.output
        [row] = [json.loads(line) for line in result.output.splitlines() if line.startswith("{")]
        [expected] = ids(llm.generate([PROMPT], GREEDY, application=application))
        assert (row["application"], row["outputs"][0]["token_ids"]) == (application, expected)


def test_the_only_application_answers_where_none_is_named(
    cli: Callable[..., Any], folders: dict[str, str], llm: LLM
) -> None:
    result = cli(*flags({"sql": folders["sql"]}), "-p", PROMPT)
    expected = llm.generate(PROMPT, GREEDY, application="sql")[0].outputs[0].text
    assert expected in result.output and "sql: " in result.output


def test_an_application_with_streams_brings_its_drafter(
    cli: Callable[..., Any], folders: dict[str, str], fast: str
) -> None:
    given = ({}, folders, {**folders, "fast": fast})
    configs = [LLMConfig(model=MODEL, drafter="auto", applications=named) for named in given]
    chosen = [drafters_of(config, config.resolve()) for config in configs]
    assert chosen[0] == chosen[1] == [zoo.default_drafter(MODEL), "suffix"] and chosen[2] == ["streams"]
    length = ("--max-tokens", "8", "--max-model-len", "256")
    result = cli("generate", "--json", "--application", f"fast={fast}", "-p", PROMPT, "--ignore-eos", *length)
    assert result.exit_code == 0, result.output
    row = json.loads(next(line for line in result.output.splitlines() if line.startswith("{")))
    assert row["application"] == "fast" and row["stats"]["row_layers"] > row["stats"]["passes"] * 12


def test_a_conversation_changes_its_application(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    talk = Conversation(llm, GREEDY, Console(), application="sql")
    talk.begin(None)
    told = {}
    for name, shown in (("", "sql answers"), ("prose", "prose answers"), ("nosuch", "no such"), ("base", "base model")):
        talk.command("/as", name)
        assert shown in capsys.readouterr().err
        told[name] = talk.application
    assert told == {"": "sql", "prose": "prose", "nosuch": "prose", "base": None}
    talk.command("/as", "sql")
    talk.answer("Tell me")
    expected = llm.chat([{"role": "user", "content": "Tell me"}], GREEDY, application="sql")[0].outputs[0].text
    assert talk.messages[-1]["content"] == expected


def card(**changes: Any) -> str:
    values = {"role": "adapter", "description": "writes SQL", "parameters": 5, "target": MODEL} | changes
    return json.dumps({k: v for k, v in values.items() if v is not None})


@pytest.fixture
def my_zoo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    make_set(tmp_path / "small-sql", seed=0)
    (tmp_path / "small-sql" / zoo.CARD).write_text(card(), encoding="utf-8")
    monkeypatch.setenv("PACELINE_ZOO", str(tmp_path))
    return tmp_path


def test_a_set_of_the_zoo_is_listed_and_loaded_by_name(my_zoo: Path, llm: LLM, cli: Callable[..., Any]) -> None:
    entry = next(e for e in zoo.available() if e.name == "small-sql")
    assert (entry.role, entry.target, entry.parameters) == ("adapter", MODEL, 5)
    assert entry.bytes == (my_zoo / "small-sql" / "streams.safetensors").stat().st_size
    assert [e.role for e in zoo.available()][0] == "target" and zoo.available()[-1].role in zoo.TRAINED_SETS
    assert f"for {MODEL}" in cli("models").output
    named = LLM(MODEL, share=llm, applications={"sql": "small-sql"}, exact=True, **SMALL)
    assert ids(named.generate(PROMPT, GREEDY, application="sql")) == ids(
        llm.generate(PROMPT, GREEDY, application="sql")
    )
