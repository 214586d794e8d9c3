"""The `kvpool` command: decides which command runs and with which code the process exits.

Exit codes: 0 ok, 1 failed, 2 usage, 3 the pool cannot be reached, 4 the pool is not healthy, 130 interrupted, 141
nobody reads its output.
"""

import importlib
import itertools
import os
import sys
from collections.abc import Sequence
from typing import Annotated

import msgspec
import typer

from kvpool.cli.output import UnhealthyError
from kvpool.core.errors import KvpoolError, UnavailableError, UsageError
from kvpool.ops.version import __version__

_COMMANDS = {
    "up": "Run a whole pool in one process on loopback.",
    "meta": "Run the metadata service.",
    "node": "Run a store node.",
    "drain": "Copy a node's blocks to other nodes and let it leave.",
    "quota": "Show or change what tenants may hold and ask for.",
    "status": "Show the nodes and namespaces of a pool.",
    "top": "Watch a pool: nodes, tiers, hit rate, bytes, namespaces.",
    "stat": "Print a line a second of what a pool does.",
    "namespaces": "Show the namespaces of a pool, or in which fields two differ.",
    "block": "Show where a block is and what holds it there.",
    "ping": "Store and load a few blocks and say how long it took.",
    "explain": "Say why blocks are not found.",
    "events": "Follow what the pool holds, as it changes.",
    "doctor": "Check this host and a pool, and say how to put right what is found.",
    "verify": "Let nodes check all the blocks they hold.",
    "demo": "Run engines against a real pool and show what it saved them.",
    "demo-vllm": "Run two vLLM engines against a real pool and compare their times and answers.",
    "simulate": "Replay a trace against the directory and show how large a pool it needs.",
    "bench": "Measure look-ups and transfers.",
    "certs": "Make the CA, certificates and tokens of a pool with TLS.",
    "vllm-config": "Print what `vllm serve` needs to be told to use a pool.",
    "config": "Show, check and document the settings.",
}
"""Command X is the function or the Typer app called X in module ``kvpool.cli.X``, there with _ for -."""

_EXIT_CODES: dict[type[Exception], int] = {
    UsageError: 2,
    typer.TyperException: 2,
    UnavailableError: 3,
    UnhealthyError: 4,
    KvpoolError: 1,
    OSError: 1,
}
"""The first class that an error is an instance of decides; anything else is a bug and shows its traceback."""


INTERRUPTED = 130
"""What shells say of a process that Ctrl-C ended."""

UNREAD = 141
"""What shells say of a process that wrote into a pipe that nobody reads: `kvpool stat | head`."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code, after a one-line error on stderr if it is not 0."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        code = build_app(arguments)(arguments, prog_name="kvpool", standalone_mode=False)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is still to be flushed goes there
        return UNREAD
    except tuple(_EXIT_CODES) as error:
        code = exit_code(error)
        _report(error, code, as_json=_wants_json(arguments))
    return code if isinstance(code, int) else 0


def exit_code(error: Exception) -> int:
    """The process's exit code for an error that ``main`` reports."""
    return next(code for kind, code in _EXIT_CODES.items() if isinstance(error, kind))


def build_app(arguments: Sequence[str] = ()) -> typer.Typer:
    """The app for these arguments: only the command that they name is imported, so that help is quick."""
    app = typer.Typer(pretty_exceptions_enable=False, rich_markup_mode=None)
    app.callback(invoke_without_command=True)(_root)
    completing = "_KVPOOL_COMPLETE" in os.environ
    wanted = next((word for word in arguments if word in _COMMANDS), None)
    for name, summary in _COMMANDS.items():
        if name != wanted and not completing:
            app.command(name, help=summary)(_not_loaded)
            continue
        module = name.replace("-", "_")
        command = getattr(importlib.import_module(f"kvpool.cli.{module}"), module)
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=name)
        else:
            app.command(name)(command)
    return app


def _root(
    context: typer.Context,
    *,
    show_version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False,
) -> None:
    """A distributed pool for the KV-cache blocks of LLM engines."""
    if show_version:
        typer.echo(f"kvpool {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def _not_loaded() -> None:
    raise AssertionError("only a command that the arguments name is run, and that one is loaded")


def _report(error: Exception, code: int, *, as_json: bool) -> None:
    message = str(error)
    if isinstance(error, typer.TyperException):
        context = getattr(error, "ctx", None)
        message = f"{error.format_message()} (see `{context.command_path if context else 'kvpool'} --help`)"
    message = " ".join(message.split())
    record = {"error": type(error).__name__, "message": message, "exit_code": code}
    typer.echo(msgspec.json.encode(record) if as_json else f"error: {message}", err=True)


def _wants_json(arguments: Sequence[str]) -> bool:
    return "--format=json" in arguments or ("--format", "json") in itertools.pairwise(arguments)


if __name__ == "__main__":
    sys.exit(main())
