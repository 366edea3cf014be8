"""The command line: one module a command, loaded when it is called.

``paceline --help`` lists the commands from the table below and imports none of them, since most need
torch. Each module has an ``app``, a `typer.Typer`, and its options are made from the dataclasses they
fill (see `options`), so that an option is declared once.
"""

from __future__ import annotations

from importlib import import_module
from typing import Annotated, Any

import typer
from rich.text import Text
from typer.core import TyperCommand

from .. import __version__
from ..core.errors import ConfigError, PacelineError
from .console import stderr
from .help import Command, Group

COMMANDS = {  # name -> what it does; the module has the same name
    "generate": "Answer prompts; each token is coloured by how it came about.",
    "chat": "Chat with a model in the terminal.",
    "serve": "Serve a model to clients of OpenAI's and Anthropic's APIs.",
    "demo": "Answer plainly and speculatively, compare tokens and speed.",
    "bench": "Measure the speed-up of speculation on this machine.",
    "adapt": "Make a drafter for a model on this machine, and measure what it is worth.",
    "train": "Train models, draft models, streams and adapters.",
    "plan": "Predict which drafter would pay for a model on a machine.",
    "models": "List the models known by name, or fetch one (models get).",
    "drafters": "List the drafters and their options.",
}
USER_ERROR = 2
INTERRUPTED = 130  # 128 + SIGINT, as shells report it


class LazyGroup(Group):
    """A group whose commands are imported when one is run, and not when they are listed."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a name and a line of help, which is all that listing needs."""
        return TyperCommand(cmd_name, help=COMMANDS[cmd_name]) if cmd_name in COMMANDS else None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[0] not in COMMANDS and not args[0].startswith("-") and not ctx.resilient_parsing:
            from ..core.options import suggest

            subject = f"paceline {args[0]}"
            raise ConfigError(subject, "there is no such command", suggest(args[0], COMMANDS, "command"))
        name, command, rest = super().resolve_command(ctx, args)
        return name, load(name) if name and command is not None else command, rest

    def invoke(self, ctx: Any) -> Any:
        """Run a command; a user error ends in one line, not in a traceback."""
        try:
            return super().invoke(ctx)
        except PacelineError as error:
            console = stderr()
            message = Text.assemble(("error:", "bold red"), f" {error}")
            console.print(message, soft_wrap=not console.is_terminal)
            raise typer.Exit(USER_ERROR) from error
        except KeyboardInterrupt as stop:
            raise typer.Exit(INTERRUPTED) from stop


def load(name: str) -> Any:
    """Return the click command of ``paceline NAME``."""
    app = import_module(f"{__name__}.{name}").app
    for info in app.registered_commands:
        info.cls = Command
    command = typer.main.get_command(app)
    command.name = name
    return command


app = typer.Typer(
    name="paceline",
    cls=LazyGroup,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(requested: bool) -> None:
    if requested:
        typer.echo(f"paceline {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Faster answers from language models, token for token the same.

    Examples:
        paceline demo
        paceline chat --model smollm2-135m
        paceline serve smollm2-135m --port 8000
    """


def main() -> None:
    """Run the ``paceline`` script."""
    app()
