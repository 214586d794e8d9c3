"""Fenced blocks of the documentation, and what is to be done with each.

A block of `console` (its commands begin with ``$``) or `python` is run; `text` is what a program says. A comment in the
line above says otherwise:

    <!-- not run: WHY -->      cannot be here
    <!-- stays -->             runs on, until the page ends, once it has printed what the block shows
    <!-- stays alone -->       the same; what stayed before it is stopped first

And one anywhere on the page, ``<!-- pool -->``, has a pool running at the usual address before its first block.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
LANGUAGES = {"console", "python"}

_FENCE = re.compile(r"^```(\S*)(.*)$")
_NOTE = re.compile(r"^<!-- (not run: (?P<why>.+)|(?P<stays>stays|stays alone)) -->$")
_COMMAND = re.compile(
    r"^(\$ |([A-Z_]+=\S+ )?(kvpool|make|docker|docker-compose|helm|kubectl|pip|uv|vllm|install|curl) )"
)


@dataclass(frozen=True)
class Block:
    """One fenced block."""

    page: Path
    line: int
    language: str
    text: str
    why_not: str
    stays: str

    @property
    def name(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    def is_run(self) -> bool:
        return self.language in LANGUAGES and not self.why_not

    def has_commands(self) -> bool:
        """Whether somebody would type what is in it."""
        if self.language == "text":
            return False
        return self.language in LANGUAGES or any(_COMMAND.match(line) for line in self.text.splitlines())

    def steps(self) -> Iterator["Step"]:
        """Its commands, each with the output that it is said to have."""
        command, output = "", ""
        for line in self.text.splitlines():
            if command.endswith("\\"):
                command = f"{command}\n{line.removeprefix('> ')}"
            elif line.startswith("$ "):
                if command:
                    yield Step(command, output)
                command, output = line.removeprefix("$ "), ""
            else:
                output += f"{line}\n"
        yield Step(command, output)


@dataclass(frozen=True)
class Step:
    """A command of a block, and what it prints; nothing: it may print anything."""

    command: str
    output: str


def blocks_of(page: Path) -> list[Block]:
    found: list[Block] = []
    lines = page.read_text(encoding="utf-8").splitlines()
    opened: int | None = None
    for number, line in enumerate(lines):
        fence = _FENCE.match(line)
        if fence is None:
            continue
        if opened is None:
            opened = number
            continue
        note = _NOTE.match(lines[opened - 1]) if opened else None
        language = _FENCE.match(lines[opened])[1]
        text = "\n".join(lines[opened + 1 : number])
        why, stays = (note["why"] or "", note["stays"] or "") if note else ("", "")
        found.append(Block(page, opened + 1, language, text, why, stays))
        opened = None
    assert opened is None, f"{page}: the block in line {opened} has no end"
    return found


def wants_pool(page: Path) -> bool:
    return "\n<!-- pool -->\n" in page.read_text(encoding="utf-8")


_LOOSE = (
    (re.compile(r"^(\.\.\.|…)\s*", re.MULTILINE), r".*?"),
    (re.compile(r"…|\.\.\."), r".*?"),
    (re.compile(r"\d[\d,]*\.\d+|\d[\d,]*(?= ?(?:ns|µs|ms|s|[KMGT]?i?B(?:/s)?|%))"), r"\d[\d,]*(?:\.\d+)?"),
    (re.compile(r"\b[0-9a-f]{8,64}\b"), r"[0-9a-f]+"),
    (re.compile(r"─+"), r"─+"),
    (re.compile(r"\s+"), r"\s+"),
)
"""What a block need not say exactly: what it leaves out, measured values, hashes, the width of tables."""


def pattern_of(output: str) -> re.Pattern[str]:
    """Matches what a command prints if it is what a block shows."""
    made, rest = "", output.strip()
    while rest:
        for loose, pattern in _LOOSE:
            if (match := loose.match(rest)) is not None and match[0]:
                made, rest = made + pattern, rest[match.end() :]
                break
        else:
            made, rest = made + re.escape(rest[0]), rest[1:]
    return re.compile(made, re.DOTALL)
