"""`kvpool config`: shows, checks and documents the settings."""

import importlib.resources
import json

import msgspec
import typer

from kvpool.cli import ConfigOption
from kvpool.cli.output import Format, FormatOption, emit, table
from kvpool.core.units import format_size
from kvpool.ops.settings import Settings
from kvpool.ops.sources import Setting, effective, load_settings

config = typer.Typer(help="Show, check and document the settings.")


@config.command()
def show(*, config: ConfigOption = None, output: FormatOption = Format.TEXT) -> None:
    """Show every setting in force, and where it came from."""
    settings = effective(load_settings(config))
    rows = [(setting.key, _text(setting), setting.source) for setting in settings]
    emit([setting._asdict() for setting in settings], output, table(("key", "value", "source"), rows))


@config.command()
def check(*, config: ConfigOption = None, output: FormatOption = Format.TEXT) -> None:
    """Check file and environment without starting anything; exit with 2 if they cannot be used."""
    given = [setting for setting in effective(load_settings(config)) if setting.source != "default"]
    emit({"ok": True, "given": len(given)}, output, f"ok: {len(given)} settings given, the rest are defaults")


@config.command()
def default(*, output: FormatOption = Format.TEXT) -> None:
    """Print the default file: every key, its default, and what it does."""
    text = importlib.resources.files("kvpool.ops").joinpath("default.yaml").read_text(encoding="utf-8")
    emit(Settings().model_dump(mode="json"), output, text.rstrip())


@config.command()
def schema(*, output: FormatOption = Format.TEXT) -> None:
    """Print the JSON schema of the file, for editors."""
    document = Settings.model_json_schema()
    emit(document, output, json.dumps(document, indent=2))


def _text(setting: Setting) -> str:
    if setting.key == "node.size" and isinstance(setting.value, int):
        return f"{setting.value} ({format_size(setting.value)})"
    return setting.value if isinstance(setting.value, str) else msgspec.json.encode(setting.value).decode()
