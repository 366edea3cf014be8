"""The command line: options made from dataclasses, help, colours, and mistakes that end in one line."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
import typer
from typer.testing import CliRunner

from paceline.api import llm
from paceline.bench.measure import EngineRunner
from paceline.cli import COMMANDS, app, load
from paceline.cli.console import Painter
from paceline.cli.options import takes
from paceline.core.errors import CapabilityError, ConfigError
from paceline.core.sampling import SamplingParams
from paceline.draft.registry import describe
from paceline.weights import zoo


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs ``paceline ARGS`` in this process: wide lines, no colours."""
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "dumb")
    return lambda *args, **given: CliRunner().invoke(app, list(args), **given)


@dataclass(frozen=True, kw_only=True)
class Options:
    model: str
    count: int = field(default=3, metadata={"help": "how many"})
    size: int | str | None = None
    fast: bool = False
    limit: int | None = 16
    mode: Literal["raw", "processed"] = "raw"
    stop: str | list[str] | None = None
    ids: list[int] | None = None
    bias: dict[int, float] | None = None
    inner: object = field(default=None, metadata={"cli": False})


def parse(*args: str) -> dict[str, Any]:
    """What a command that takes `Options` gets for these arguments."""
    seen: dict[str, Any] = {}
    small = typer.Typer()

    @small.command()
    @takes(options=Options, defaults={"count": 5})
    def command(own: Annotated[int, typer.Option(help="its own")] = 1, *, options: dict[str, Any]) -> None:
        seen.update(options, own=own)

    result = CliRunner().invoke(small, list(args), catch_exceptions=True)
    if isinstance(result.exception, ConfigError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return seen


class TestOptions:
    def test_every_type_is_read(self) -> None:
        flags = "--model m --own 4 --count 7 --size 1GiB --fast --mode processed --limit none"
        given = parse(*f"{flags} --stop a --stop b --ids 1 --ids 2 --bias 7=-2.5 --bias 8=1".split())
        assert given == {
            **{"own": 4, "model": "m", "count": 7, "size": "1GiB", "fast": True, "limit": None, "mode": "processed"},
            **{"stop": ["a", "b"], "ids": [1, 2], "bias": {7: -2.5, 8: 1.0}},
        }

    @pytest.mark.parametrize(
        "args", [("--limit", "x"), ("--count", "x"), ("--mode", "other"), ("--inner", "1"), ("--count", "none")]
    )
    def test_what_does_not_parse_is_a_usage_error(self, args: tuple[str, ...]) -> None:
        with pytest.raises(AssertionError, match="Usage"):
            parse("--model", "m", *args)

    def test_sampling_params_survive_the_way_through_flags(self) -> None:
        small, seen = typer.Typer(), {}

        @small.command()
        @takes(params=SamplingParams)
        def command(*, params: dict[str, Any]) -> None:
            seen["params"] = SamplingParams(**params)

        assert CliRunner().invoke(small, []).exit_code == 0
        assert seen["params"] == SamplingParams()
        flags = ["--temperature", "0.5", "--stop", "x", "--stop-token-ids", "3", "--logit-bias", "4=1", "--ignore-eos"]
        assert CliRunner().invoke(small, flags).exit_code == 0
        assert seen["params"] == SamplingParams(
            temperature=0.5, stop=["x"], stop_token_ids=[3], logit_bias={4: 1.0}, ignore_eos=True
        )


class TestPainter:
    @pytest.fixture
    def tokenizer(self) -> Any:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(zoo.find("paceline-small"))

    def origins(self, painter: Painter, text: str) -> list[tuple[str, str]]:
        painted = painter.take(text)
        assert painted.plain == text
        return [(text[span.start : span.end], str(span.style)) for span in painted.spans]

    def test_each_token_has_its_colour(self, tokenizer: Any) -> None:
        ids = tokenizer.encode(" SELECT name FROM", add_special_tokens=False)
        origins = ["drafted" if i % 2 else "target" for i in range(len(ids))]
        painter = Painter(tokenizer, [])
        painter.feed(ids, origins)
        drafted = [token for token, origin in zip(ids, origins, strict=True) if origin == "drafted"]
        expected = [(tokenizer.decode([token]), "green") for token in drafted]  # the others: the terminal's own colour
        assert len(ids) >= 3
        assert self.origins(painter, tokenizer.decode(ids)) == expected


@pytest.fixture
def own_draft(tmp_path: Path) -> Path:
    """A copy of a small model, whose files may be changed."""
    source = zoo.find("paceline-small-draft")
    assert source is not None
    return Path(shutil.copytree(source, tmp_path / "own"))


class TestCommands:
    def test_help_lists_every_command(self, run: Any) -> None:
        result = run("--help")
        assert result.exit_code == 0
        assert all(name in result.output for name in COMMANDS)

    @pytest.mark.parametrize(
        "code",
        [
            "from paceline.cli import app; app(['--help'], standalone_mode=False)",
            "from paceline.cli import load; load('serve')",
            "from paceline.draft import registry; registry.names()",
        ],
    )
    def test_what_needs_no_torch_does_not_load_it(self, code: str) -> None:
        command = [sys.executable, "-c", f"{code}; import sys; sys.exit('torch' in sys.modules)"]
        subprocess.run(command, check=True, capture_output=True, timeout=60)

    def test_models(self, run: Any) -> None:
        result = run("models")
        assert result.exit_code == 0
        for entry in zoo.available():
            assert entry.name in result.output
        assert "  default drafter: hybrid:paceline-small-draft,dtype=int8\n" in result.output
        assert (
            "  default drafter: suffix, in bfloat16 hybrid:suffix+eagle:smollm2-135m-eagle, in float32" in result.output
        )

    def test_drafters(self, run: Any) -> None:
        listed = run("drafters").output
        assert all(re.search(rf"^{row.name}  .+\({row.origin}\)$", listed, re.MULTILINE) for row in describe())
        assert "for paceline-small the zoo has paceline-small-lyanna" in listed and "cannot be used" not in listed

    def test_help_is_whole_at_80_columns(self, run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("COLUMNS", "80")
        for name in COMMANDS:
            command = load(name)
            subs = {sub: each for sub, each in getattr(command, "commands", {}).items() if not each.hidden}
            for words, each in {(): command, **{(sub,): each for sub, each in subs.items()}}.items():
                output = run(name, *words, "--help").output
                assert max(map(len, output.splitlines())) <= 80
                assert "…" not in output and "list[" not in output
                shown = set(re.findall(r"--[a-z0-9-]+", output))
                assert {opt for param in each.params for opt in param.opts if opt.startswith("--")} <= shown
        output = run("generate", "--help").output
        for panel in ("Options", "Sampling", "Model", "Speculation", "Memory and batches", "Processes and hosts"):
            assert f"╭─ {panel} ─" in output
        assert "│ --exact  " in output and re.search(r"│ --skip-special-tokens .*\n│ --no-skip-special-tokens ", output)

    @pytest.mark.parametrize("name", ["", *COMMANDS])
    def test_help_ends_with_three_examples_that_parse(
        self, run: Any, monkeypatch: pytest.MonkeyPatch, name: str
    ) -> None:
        monkeypatch.setenv("COLUMNS", "80")
        _, _, panel = run(*([name] if name else []), "--help").output.partition("─ Examples ─")
        examples = re.findall(r"^│ paceline (.*?) *│$", panel, re.MULTILINE)
        assert len(examples) == 3
        for example in examples:
            called, *words = shlex.split(example.partition(" < ")[0])
            context = load(called).make_context(called, words)
            if getattr(context.command, "commands", {}) and words and not words[0].startswith("-"):
                sub, command, rest = context.command.resolve_command(context, words)
                command.make_context(sub, rest, parent=context)

    @pytest.mark.parametrize(
        ("args", "message"),
        [
            (["generate"], "no prompt"),
            (
                ["generate", "--prompt", "x", "--max-tokens", "-1"],
                "max_tokens=-1: max_tokens must be 1 or more. Give a valid max_tokens: most tokens of output",
            ),
            (
                ["generate", "--prompt", "x", "--exact", "--verifier", "block", "--drafter", "ngram"],
                "exact=True with verifier='block': its ids depend on the drafter by design. Use verifier='sample_and_",
            ),
            (
                ["generate", "--prompt", "x", "--round", "mirror", "--budget", "auto"],
                "budget='auto' with round='mirror': the automatic budget",
            ),
            (["generate", "--prompt", "x", "--logprobs", "2"], "--json"),
            (["generate", "--prompt-file", "/nowhere/at/all"], "/nowhere/at/all"),
            (["generate", "--prompt", "x", "--pipeline", "13", "--drafter", "ngram"], "the target has 12 layers"),
            (["generate", "--prompt", "x", "--pipeline", "2,cores=<4096,0>", "--drafter", "ngram"], "core 4096"),
            (["generate", "--prompt", "x", "--pipeline", "2", "--round", "mirror"], "pipeline round"),
            (["generate", "--prompt", "x", "--cluster", "nowhere"], "address is not an address"),
            (["genrate"], "mean 'generate'"),
            (["generate", "--prompt", "x", "--model", "paceline-smal"], "Did you mean 'paceline-small'? Downl"),
            (["generate", "--prompt", "x", "--drafter", "eagle:paceline-small-eagl"], "mean 'paceline-small-eagle'?"),
            (["adapt", "paceline-small", "--model", "other"], "paceline-small and --model other: two models are named"),
            (["adapt"], "no model: there is nothing to work on. Name one: --model paceline-small."),
            (["generate", "--prompt", "x", "--kv-memory", "much"], "kv_memory='much': not a size"),
            (["generate", "--prompt", "x", "--verifier", "rejection"], "coupled"),
            (["generate", "--prompt", "word " * 3000], "2048 tokens"),
        ],
    )
    def test_mistakes_end_in_one_line_and_status_2(self, run: Any, args: list[str], message: str) -> None:
        result = run(*args)
        assert result.exit_code == 2
        assert result.stdout == ""
        assert result.stderr.startswith("error: ") and message in result.stderr
        assert len(result.stderr.splitlines()) == 1

    @pytest.mark.parametrize("harm", ["weights", "tokenizer"])
    def test_a_broken_checkpoint_ends_in_one_line(self, run: Any, tmp_path: Path, harm: str) -> None:
        source = zoo.find("paceline-small-draft")
        assert source is not None
        folder = Path(shutil.copytree(source, tmp_path / "broken"))
        if harm == "weights":
            with (folder / "model.safetensors").open("r+b") as weights:
                weights.truncate(100_000)
        else:
            (folder / "tokenizer.json").write_text('{"a": ', encoding="utf-8")
        result = run("generate", "--prompt", "x", "--model", str(folder))
        assert result.exit_code == 2
        assert result.stderr.startswith("error: ") and str(folder) in result.stderr
        assert len(result.stderr.splitlines()) == 1

    def test_json_holds_only_what_json_has(self, run: Any) -> None:
        args = ("--logprobs", "4", "--logprobs-mode", "processed", "--top-k", "2", "--temperature", "1", "--json")
        line = run("generate", "--prompt", "It was", "--max-tokens", "3", "--seed", "1", *args).stdout

        def refuse(word: str) -> None:
            raise AssertionError(f"{word} is no JSON")

        (sample,) = json.loads(line, parse_constant=refuse)["outputs"]
        values = [entry["logprob"] for row in sample["logprobs"] for entry in row.values()]
        assert None in values and any(value is not None for value in values)  # the impossible ones are null

    def test_answers_to_several_prompts_are_set_apart(self, run: Any) -> None:
        args = ("--model", "paceline-small-draft", "--drafter", "none", "--max-tokens", "4")
        result = run("generate", "-p", "It was\na dark night", "-p", "Once", *args)
        first, _, rest = result.stdout.partition("\n\n[2 of 2] Once\n")
        assert first.startswith("[1 of 2] It was\n") and len(first.splitlines()) >= 2 and rest.strip()
        figures = r"[\d.]+ tokens/s, 1\.00 tokens a pass, prompt \d in [\d.]+ m?s"
        assert all(re.fullmatch(figures, line) for line in result.stderr.splitlines())
        assert len(result.stderr.splitlines()) == 2
        verbose = run("generate", "-p", "Once", *args, "--verbose").stderr
        assert "4 target passes for 4 tokens" in verbose and "speculation off" in verbose

    @pytest.mark.parametrize("prompts", [1, 2])
    def test_ctrl_c_keeps_the_answers_and_figures_so_far(
        self, run: Any, monkeypatch: pytest.MonkeyPatch, prompts: int
    ) -> None:
        from paceline.engine.engine import Engine

        step, steps = Engine.step, [0]

        def interrupted(engine: Engine) -> Any:
            steps[0] += 1
            if steps[0] == 6:
                signal.raise_signal(signal.SIGINT)
            return step(engine)

        before = signal.getsignal(signal.SIGINT)
        monkeypatch.setattr(Engine, "step", interrupted)
        args = ("--model", "paceline-small-draft", "--drafter", "none", "--max-tokens", "99", "--ignore-eos")
        result = run("generate", *("-p", "It was") * prompts, *args)
        assert result.exit_code == 130 and result.stdout.strip() and steps[0] == 6
        assert result.stderr.count("tokens/s, 1.00 tokens a pass, prompt 3 in") == prompts
        assert signal.getsignal(signal.SIGINT) is before

    @pytest.mark.parametrize("own", [False, True], ids=["zoo", "own"])
    def test_generate_drafts_without_a_drafter_named(self, own: bool, run: Any, own_draft: Path) -> None:
        model = ("--model", str(own_draft), "--budget", "4") if own else ()
        prompt = "def add(a, b):\n    return a + b\n\n\n" * 4
        record = json.loads(run("generate", *model, "--prompt", prompt, "--max-tokens", "24", "--json").stdout)
        output, stats = record["outputs"][0], record["stats"]
        assert len(output["token_ids"]) == 24 and output["origins"].count("drafted") == stats["accepted"] > 0
        assert stats["passes"] < 24 and stats["off_reason"] is None

    @pytest.mark.parametrize(
        ("args", "fields"),
        [
            (["generate", "--chat"], {"temperature": 0.4, "top_p": 0.8, "max_tokens": 128}),
            (["generate", "--top-p", "0.5"], {"temperature": 0, "top_p": 0.5, "max_tokens": 128}),
            (["chat"], {"temperature": 0.4, "top_p": 0.8, "max_tokens": 256}),
        ],
    )
    def test_a_chat_is_sampled_as_the_model_s_files_say(
        self, args: list[str], fields: dict[str, Any], run: Any, own_draft: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        seen: list[SamplingParams] = []

        def stop(llm: Any, asked: Any, params: SamplingParams, *_: Any, **__: Any) -> Any:
            seen.append(params)
            raise ConfigError("an answer", "not needed here", "look at the parameters")

        for name in ("chat", "stream"):
            monkeypatch.setattr(f"paceline.api.llm.LLM.{name}", stop)
        (own_draft / "generation_config.json").write_text('{"temperature": 0.4, "top_p": 0.8}', encoding="utf-8")
        prompt = ("--prompt", "x") if args[0] == "generate" else ()
        run(*args, *prompt, "--model", str(own_draft), "--drafter", "none", input="hello\n/exit\n")
        assert seen == [SamplingParams(**fields)]

    def test_demo_compares(self, run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("COLUMNS", "80")
        result = run("demo", "--model", "paceline-small", "--prompts", "2", "--drafter", "suffix", "--threads", "1")
        assert result.exit_code == 0, result.output
        assert "IDENTICAL: 12 of 12" in result.stdout
        stdout = result.stdout.replace(",", "")
        rates = dict(re.findall(r"^((?:bf16|4 bits) (?:plain|drafts)) +([\d.]+)", stdout, re.MULTILINE))
        [(dtype, drafts, rate)] = re.findall(
            r"take --dtype (\w+) with (no drafts|drafts of suffix).*: (\d+) tokens/s", " ".join(stdout.split())
        )
        ways = {"bfloat16": "bf16", "q4_0": "4 bits"}
        way = f"{ways[dtype]} {'plain' if drafts == 'no drafts' else 'drafts'}"
        assert len(rates) == 4 and float(rates[way]) >= max(map(float, rates.values())) / 1.05
        assert abs(float(rates[way]) - int(rate)) < 1

    def test_demo_refuses_to_compare_nothing(self, run: Any) -> None:
        result = run("demo", "--model", "paceline-small", "--drafter", "none")
        assert result.exit_code == 2 and "drafts nothing" in result.stderr

    def test_demo_takes_the_next_default_where_the_first_cannot_run(
        self, run: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(
            llm,
            "drafters_of",
            lambda config, *_: ["suffix", "ngram,depth=3"] if config.drafter == "auto" else [config.drafter],
        )
        build = llm.build_engine

        def refuse(config: Any, *more: Any) -> Any:
            if config.drafter == "suffix":
                raise CapabilityError("suffix", "it cannot run here", "take ngram")
            return build(config, *more)

        monkeypatch.setattr(llm, "build_engine", refuse)
        result = run("demo", "--model", "paceline-small", "--prompts", "1", "--threads", "1")
        assert result.exit_code == 0, result.output
        assert "IDENTICAL: 12 of 12" in result.stdout

    def test_demo_fails_with_its_trials(self, run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        drive = EngineRunner._drive

        def fail(self: EngineRunner, group: Any, trial: Any, *more: Any) -> None:
            if not self.method.plain and group.index == 0 and not more:
                raise RuntimeError("no luck")
            drive(self, group, trial, *more)

        monkeypatch.setattr(EngineRunner, "_drive", fail)
        options = ("--dtype", "bfloat16", "--prompts", "1", "--threads", "1", "--drafter", "ngram")
        result = run("demo", "--model", "paceline-small", *options)
        assert result.exit_code == 1
        assert "no luck" in result.stderr and "IDENTICAL" not in result.stdout

    def test_demo_shows_the_public_model_where_it_is(
        self, monkeypatch: pytest.MonkeyPatch, run: Any, tmp_path: Path
    ) -> None:
        from paceline.cli import demo

        seen: list[str] = []

        def stop(options: dict[str, Any]) -> None:
            seen.append(options["model"])
            raise ConfigError("a model", "not needed here", "look at the options")

        monkeypatch.setattr(demo, "_sides", stop)
        monkeypatch.setenv("PACELINE_WEIGHTS", str(tmp_path))
        monkeypatch.setenv("HF_HOME", str(tmp_path))
        [card] = [entry for entry in zoo.available() if entry.name == demo.SHOWN]
        if card.path is not None:
            pytest.skip("its package is installed here")
        assert "paceline-small is shown instead" in " ".join(run("demo").stderr.split())
        assert card.published is not None
        (tmp_path / card.published.file).write_bytes(b"")
        run("demo")
        assert seen == ["paceline-small", "smollm2-135m"]
