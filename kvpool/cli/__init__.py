"""The command line; here what its commands share: flags made from settings, and serving until a signal."""

import contextlib
import inspect
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from kvpool.cli.output import Format, FormatOption
from kvpool.cli.signals import ignore, unwind_once, wakeups
from kvpool.core.units import format_size
from kvpool.ops.failpoints import arm
from kvpool.ops.logging import configure
from kvpool.ops.sources import field_of, flag_name, load_settings

ConfigOption = Annotated[
    Path | None,
    typer.Option("--config", help="YAML file of settings; `kvpool config default` prints one."),
]

_LOG_KEYS = ("log.level", "log.format")
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def with_settings(*keys: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Turn ``command(settings, output, ...)`` into one with a flag per key, ``--config`` and ``--format``.

    Help and defaults come from the settings, so that a flag says nothing twice. A flag not given is None, and
    the settings decide. What the command takes besides is Typer's as it stands.
    """
    flags = {key.replace(".", "_"): key for key in (*keys, *_LOG_KEYS)}

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = list(inspect.signature(command).parameters.values())[2:]

        def run(config: Path | None, output: Format, **values: object) -> None:
            besides = {parameter.name: values.pop(parameter.name) for parameter in own}
            settings = load_settings(config, {flags[name]: value for name, value in values.items()})
            configure(settings.log)
            arm(os.environ)
            command(settings, output, **besides)

        parameters = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in own]
        parameters += [_parameter(name, _flag(key), None) for name, key in flags.items()]
        parameters.append(_parameter("config", ConfigOption, None))
        parameters.append(_parameter("output", FormatOption, Format.TEXT))
        run.__doc__ = command.__doc__
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return run

    return decorate


def serve(
    start: Callable[[], object],
    announce: Callable[[], None],
    stop: Callable[[], None],
    drain: Callable[[], None] | None = None,
) -> None:
    """Start, announce, run until SIGTERM (then drain) or SIGINT, and stop; a second signal ends the drain.

    ``stop`` is called if and only if ``start`` returned.
    """
    unwind_once(_STOP_SIGNALS)
    start()
    try:
        with wakeups() as signals:
            ignore(_STOP_SIGNALS)
            announce()
            received = signals.recv(1)[0]
        if received == signal.SIGTERM and drain is not None:
            with contextlib.suppress(KeyboardInterrupt, SystemExit):
                unwind_once(_STOP_SIGNALS)
                drain()
    finally:
        try:
            ignore(_STOP_SIGNALS)
        finally:
            stop()


def _flag(key: str) -> object:
    field = field_of(key)
    flag = flag_name(key)
    if field.annotation is bool and field.default:
        flag = f"{flag}/--no-{flag.removeprefix('--')}"  # what is on by default can only be switched off
    option = typer.Option(flag, help=field.description, show_default=_default_text(key) or False)
    return Annotated[bool | None, option] if field.annotation is bool else Annotated[str | None, option]


def _default_text(key: str) -> str:
    default = field_of(key).default
    if key in {"node.size", "node.scrub_bytes_per_s"}:
        return format_size(default)
    if key.endswith("_s"):
        return f"{default:g}s"
    return str(default) if isinstance(default, str | Path) or type(default) in {int, float} else ""


def _parameter(name: str, annotation: object, default: object) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
