"""`python -m kvpool.cli.reference`, in the repository's root: writes the pages that are made of the commands."""

import importlib.resources
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from kvpool.cli.main import build_app

_MADE = "<!-- made of the commands by `make docs-generated`: do not edit -->"

_CLI = """\
# Command line

Every command takes `--help` and `--format json`. Flags beat environment variables, which beat the file
([configuration](configuration.md)). Exit codes: 0 ok, 1 failed, 2 usage, 3 the pool cannot be reached, 4 the pool is
not healthy, 130 interrupted.
"""

_CONFIGURATION = """\
# Configuration

Every setting is a flag of its command, an environment variable and a key of a YAML file: `--lease-max 20s`,
`KVPOOL_META__LEASE_MAX_S=20s` and `meta: {lease_max_s: 20s}` say the same. The first of flag, variable, file and
default decides; `kvpool config show` says which did. The file is named by `--config` or `KVPOOL_CONFIG`, and this is
the default one, as `kvpool config default` prints it:
"""


def pages() -> dict[str, str]:
    """Every page made here: its content by its path in the repository."""
    return {"docs/cli.md": command_line(), "docs/configuration.md": configuration()}


def command_line() -> str:
    """The page with every command and its flags."""
    lines = [_MADE, _CLI]
    names: Any = typer.main.get_command(build_app())
    for name in names.commands:
        group: Any = typer.main.get_command(build_app([name]))
        lines += _command(group.commands[name], f"kvpool {name}", 2)
    return "\n".join(lines)


def configuration() -> str:
    """The page with every setting."""
    default = importlib.resources.files("kvpool.ops").joinpath("default.yaml").read_text(encoding="utf-8")
    return f"{_MADE}\n{_CONFIGURATION}\n```yaml\n{default.rstrip()}\n```\n"


def _command(command: Any, path: str, level: int) -> Iterator[str]:  # noqa: ANN401 - of Typer's own kind
    context = command.make_context(path, [], resilient_parsing=True)
    yield f"{'#' * level} {path}\n"
    yield f"{_paragraphs(command.help or '')}\n"
    inner = getattr(command, "commands", {})
    if not inner:
        yield f"```text\n{' '.join([path, *command.collect_usage_pieces(context)])}\n```\n"
        records = [p.get_help_record(context) for p in command.get_params(context)]
        rows = [record for record in records if record is not None]
        yield "| | |\n| --- | --- |"
        for flags, text in rows:
            yield f"| `{_cell(flags)}` | {_cell(text)} |"
        yield ""
    for name, one in inner.items():
        yield from _command(one, f"{path} {name}", level + 1)


def _paragraphs(text: str) -> str:
    return "\n\n".join(" ".join(part.split()) for part in text.split("\n\n"))


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    os.environ.pop("KVPOOL_CONFIG", None)
    for page, content in pages().items():
        Path(page).write_text(content, encoding="utf-8")
