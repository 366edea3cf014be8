"""``paceline chat``: a conversation in the terminal, with the keys and the history of readline.

Several lines that are pasted are one turn. Ctrl-C stops the answer that is being written, not the program; what was
written stays in the conversation. Nothing of the history is kept on disk.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Annotated, Any

import typer
from rich.console import Console

from ..api.config import LLMConfig
from ..api.llm import LLM
from ..core.errors import ConfigError, RequestError
from ..core.sampling import SamplingParams
from .console import coloured, legend, note, stderr, stdout
from .options import DEFAULTS, takes
from .session import (
    CHAT_SHOWN,
    SAMPLED,
    Color,
    Verbose,
    application_named,
    chosen,
    figures,
    open_llm,
    painted,
    stopping,
)

with suppress(ImportError):
    import readline

    readline.parse_and_bind("set enable-bracketed-paste on")  # Python turns it off

app = typer.Typer(add_completion=False)
HELP = (
    "/exit leaves, /reset forgets the conversation, /system TEXT sets the system prompt, /as NAME changes the "
    "application, Ctrl-C stops an answer"
)


@app.command()
@takes(
    params=SamplingParams,
    llm=LLMConfig,
    defaults={**DEFAULTS, "max_tokens": 256, **SAMPLED},
    shown=CHAT_SHOWN,
)
def chat(
    system: Annotated[str | None, typer.Option(help="A system prompt to begin with.")] = None,
    as_: Annotated[
        str | None, typer.Option("--as", metavar="NAME", help="Which application answers; base for none.")
    ] = None,
    show_figures: Annotated[bool, typer.Option("--figures/--no-figures", help="A line of figures an answer.")] = True,
    verbose: Verbose = False,
    color: Color = True,
    *,
    llm: dict[str, Any],
    params: dict[str, Any],
) -> None:
    """Chat with a model, sampled by its generation_config.json. Type /help for the commands.

    Examples:
        paceline chat --model smollm2-135m
        paceline chat --model folder/model.gguf --system "Answer briefly."
        paceline chat --drafter suffix --temperature 0 --verbose
    """
    given = chosen(params)
    _refuse_batch_options(SamplingParams(**given))
    application = application_named(as_, llm["applications"] or {})
    model = open_llm(llm, 1)
    sampling = model.default_sampling_params(**given)
    talk = Conversation(model, sampling, stdout(color), show_figures, verbose, application)
    talk.begin(system)
    talk.run()


def _refuse_batch_options(params: SamplingParams) -> None:
    """Refuse options whose result has no place in a conversation."""
    for name, idle in (("n", 1), ("echo", False), ("logprobs", None), ("prompt_logprobs", None)):
        value = getattr(params, name)
        if value != idle:
            raise ConfigError(f"--{name.replace('_', '-')} {value}", "it has no use in a chat", "use paceline generate")


@dataclass
class Conversation:
    """The messages so far, and the loop that adds to them."""

    model: LLM
    params: SamplingParams
    console: Console
    show_figures: bool
    verbose: bool = False
    application: str | None = None
    system: str | None = None
    messages: list[dict[str, str]] = field(default_factory=list)

    @property
    def commands(self) -> dict[str, Callable[[str], None]]:
        """Return the commands that begin with a slash; each takes the rest of the line."""
        return {
            "/reset": self._reset,
            "/system": self._set_system,
            "/as": self._set_application,
            "/help": lambda rest: note(HELP),
        }

    def begin(self, system: str | None) -> None:
        """Forget everything but the system prompt."""
        self.system = system
        self.messages = [{"role": "system", "content": system}] if system else []

    def run(self) -> None:
        """Read and answer until /exit or the end of input."""
        if coloured(self.console):
            self.console.print(legend())
        note(HELP)
        while (line := self._read()) is not None:
            word, _, rest = line.partition(" ")
            if word in self.commands:
                self.commands[word](rest.strip())
            elif word.startswith("/"):
                note(f"unknown command {word}: {HELP}")
            elif line:
                self.answer(line)

    def answer(self, question: str) -> None:
        """Answer a question and add both sides to the conversation; a refused question is removed."""
        self.messages.append({"role": "user", "content": question})
        try:
            text = self._stream()
        except (ConfigError, RequestError) as error:
            self.messages.pop()
            stderr().print(f"error: {error}", style="red", markup=False)
            return
        self.messages.append({"role": "assistant", "content": text})

    def _stream(self) -> str:
        chunks = self.model.chat(self.messages, self.params, stream=True, application=self.application)
        text = ""
        try:
            with stopping(self.model) as stopped:
                for chunk in painted(self.console, self.model, chunks, self.params):
                    text += chunk.text
                    if chunk.output is not None:
                        line = figures(chunk.output, self.verbose) if self.show_figures else ""
                        note(f"\n{'(stopped) ' * bool(stopped)}{line}")
        except KeyboardInterrupt:  # the second one
            chunks.close()  # the engine drops the request
            note("\n(stopped)")
        self.console.print()
        return text

    def _read(self) -> str | None:
        """Return the next line, or None to leave."""
        edited = sys.stdin.isatty() and sys.stdout.isatty()  # readline needs both; else stdout has answers alone
        try:
            line = (input("> ") if edited else stderr().input("> ")).strip()
        except EOFError:
            return None
        except KeyboardInterrupt:
            note("\n" + HELP)
            return ""
        return None if line == "/exit" else line

    def _reset(self, rest: str) -> None:
        self.begin(self.system)
        note("a new conversation")

    def _set_system(self, text: str) -> None:
        if not text:
            note(f"the system prompt is: {self.system or '(none)'}")
            return
        self.begin(text)
        note("a new conversation with this system prompt")

    def _set_application(self, name: str) -> None:
        """Let another application give the next answers; the conversation stays."""
        try:
            if name:
                self.application = application_named(name, self.model.engine.applications)
        except ConfigError as error:
            note(str(error))
            return
        note(f"{self.application or 'the base model'} answers")
