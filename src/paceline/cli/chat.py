"""``paceline chat``: a conversation in the terminal, with the keys and the history of readline.

Several lines that are pasted are one turn. Ctrl-C stops the answer that is being written, not the program; text that
was written stays in the conversation. Nothing of the history is kept on disk.
"""

from __future__ import annotations

import sys
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
    Application,
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
    shown_defaults=CHAT_SHOWN,
    without={"n", "echo", "logprobs", "prompt_logprobs"},
)
def chat(
    system: Annotated[str | None, typer.Option(help="A system prompt to begin with.")] = None,
    as_: Application = None,
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
    overrides = chosen(params)
    SamplingParams(**overrides)  # refused before the model is loaded
    application = application_named(as_, llm["applications"] or {})
    model = open_llm(llm, 1)
    sampling = model.default_sampling_params(**overrides)
    talk = Conversation(model, sampling, stdout(color), verbose, application)
    talk.begin(system)
    talk.run()


@dataclass
class Conversation:
    """The messages so far, and the loop that adds to them."""

    model: LLM
    params: SamplingParams
    console: Console
    verbose: bool = False
    application: str | None = None
    system: str | None = None
    messages: list[dict[str, str]] = field(default_factory=list)

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
            if line.startswith("/"):
                word, _, rest = line.partition(" ")
                self.command(word, rest.strip())
            elif line:
                self.answer(line)

    def command(self, word: str, rest: str) -> None:
        """Run a line that begins with a slash."""
        if word == "/reset" or (word == "/system" and rest):
            self.begin(rest or self.system)
            note("a new conversation" + (" with this system prompt" if rest else ""))
        elif word == "/system":
            note(f"the system prompt is: {self.system or '(none)'}")
        elif word == "/as":  # another application gives the next answers; the conversation stays
            try:
                self.application = application_named(rest, self.model.engine.applications) if rest else self.application
                note(f"{self.application or 'the base model'} answers")
            except ConfigError as error:
                note(str(error))
        else:
            note(HELP if word == "/help" else f"unknown command {word}: {HELP}")

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
                        note(f"\n{'(stopped) ' * bool(stopped)}{figures(chunk.output, self.verbose)}")
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
