"""What `kvpool top` draws of one frame; the same for a terminal, a pipe and a picture."""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Literal

from rich import box
from rich.columns import Columns
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.measure import Measurement
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from kvpool.cli.output import shown
from kvpool.cli.watching import Frame
from kvpool.core.directory import DISK
from kvpool.core.members import MemberState
from kvpool.core.namespace import parse_namespace
from kvpool.core.units import format_size

if TYPE_CHECKING:
    from kvpool.client.results import NodeStatus

HISTORY = 60
BAR_CELLS_MIN, BAR_CELLS = 2, 16
PERCENT_CELLS = 5
FULL = 0.95
"""As a cache is, sooner or later: from there on what is new makes something old go."""

History = deque[Frame]

_BLOCKS = "▁▂▃▄▅▆▇█"
_STATES = {
    MemberState.READY: "green",
    MemberState.JOINING: "yellow",
    MemberState.DRAINING: "yellow",
    MemberState.LOST: "bold red",
}


def view(frame: Frame, history: History, uri: str, namespaces: int) -> RenderableType:
    """One frame."""
    parts: list[RenderableType] = [_headline(frame, uri), _figures(frame, history), _nodes(frame)]
    if namespaces and frame.rates.namespaces:
        parts.append(_namespaces(frame, namespaces))
    parts.append(_lists(frame))
    return Group(*parts)


def trouble(message: str, last: Frame, history: History, uri: str, namespaces: int) -> RenderableType:
    """What was seen last, and why there is no more."""
    return Group(Text(message, style="bold red"), view(last, history, uri, namespaces))


def bar(share: float, cells: int = BAR_CELLS) -> Text:
    """A bar that turns yellow when it is full."""
    share = min(max(share, 0.0), 1.0)
    eighths = round(share * cells * 8)
    full, rest = divmod(eighths, 8)
    drawn = "█" * full + ("▏▎▍▌▋▊▉"[rest - 1] if rest else "")
    style = "yellow" if share >= FULL else "green"
    return Text.assemble((drawn, style), ("·" * (cells - len(drawn)), "bright_black"), f" {share:4.0%}")


def sparkline(values: Iterable[float | None], top: float | None = None) -> str:
    """One character a value, up to ``top`` or the largest; a space where there is none."""
    known = list(values)
    highest = top or max((value for value in known if value is not None), default=0.0)
    steps = len(_BLOCKS) - 1
    levels = (None if v is None else round(steps * min(v / highest, 1.0)) if highest else 0 for v in known)
    return "".join(" " if level is None else _BLOCKS[level] for level in levels)


def rate(bytes_per_s: float) -> str:
    """Bytes a second, in the unit that transports are spoken of."""
    for unit, size in (("GB/s", 1e9), ("MB/s", 1e6), ("kB/s", 1e3)):
        if bytes_per_s >= size:
            return f"{bytes_per_s / size:.2f} {unit}"
    return f"{bytes_per_s:.0f} B/s"


def _headline(frame: Frame, uri: str) -> Text:
    status = frame.status
    ready = sum(node.state == MemberState.READY for node in status.nodes)
    text = Text.assemble(
        ("kvpool ", "bold"),
        (uri, "cyan"),
        f"  {ready} of {len(status.nodes)} nodes ready  {len(status.namespaces)} namespaces"
        f"  up {_duration(status.uptime_s)}  {status.version}",
    )
    if status.security == "insecure":
        text.append("  INSECURE", "bold red")
    if status.recovery.active:
        text.append(f"  recovering: {status.recovery.nodes_reported} nodes have reported", "yellow")
    return text


def _figures(frame: Frame, history: History) -> RenderableType:
    rates, counters = frame.rates, frame.status.counters
    past = [old.rates for old in history]
    hit_rate = "-" if rates.hit_rate is None else f"{rates.hit_rate:.1%}"
    misses = sum(rates.misses_per_s.values())
    figures = (
        ("hit rate", hit_rate, sparkline((old.hit_rate for old in past), 1.0), "of blocks asked for", "green"),
        (
            "read",
            rate(rates.read_bytes_per_s),
            sparkline(old.read_bytes_per_s for old in past),
            "told to readers",
            "cyan",
        ),
        (
            "stored",
            rate(rates.stored_bytes_per_s),
            sparkline(old.stored_bytes_per_s for old in past),
            "committed",
            "magenta",
        ),
        (
            "look-ups",
            f"{rates.lookups_per_s:,.0f}/s",
            sparkline(old.lookups_per_s for old in past),
            f"{misses:,.0f}/s end early",
            "blue",
        ),
        (
            "evictions",
            f"{rates.evicted_blocks_per_s:,.0f}/s",
            sparkline(old.evicted_blocks_per_s for old in past),
            f"{counters.get('leases', 0):,} leases",
            "yellow",
        ),
    )
    table = Table.grid(expand=True, padding=(0, 1))
    for _ in figures:
        table.add_column(ratio=1)
    table.add_row(*(_figure(*figure) for figure in figures))
    return table


def _figure(name: str, value: str, line: str, note: str, style: str) -> Panel:
    body = Group(
        Text(value, style=f"bold {style}"),
        _Spark(line, style),
        Text(note, style="bright_black", no_wrap=True, overflow="ellipsis"),
    )
    return Panel(body, title=name, title_align="left", border_style="bright_black", box=box.ROUNDED)


class _Bar:
    """`bar`, as long as there is room for."""

    def __init__(self, share: float) -> None:
        self._share = share

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        yield bar(self._share, max(BAR_CELLS_MIN, min(options.max_width - PERCENT_CELLS, BAR_CELLS)))

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(BAR_CELLS_MIN + PERCENT_CELLS, BAR_CELLS + PERCENT_CELLS)


class _Spark:
    """The end of a sparkline, as much as there is room for."""

    def __init__(self, line: str, style: str) -> None:
        self._line = line
        self._style = style

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        yield Text(self._line[-options.max_width :].rjust(options.max_width), style=self._style, no_wrap=True)


def _nodes(frame: Frame) -> Table:
    has_disks = any(segment.medium == DISK for node in frame.status.nodes for segment in node.segments)
    table = _table(
        "node", "state", "|memory", ">of", *(["|disk", ">of"] if has_disks else []), ">blocks", ">out", ">in"
    )
    for node in frame.status.nodes:
        ways = frame.rates.nodes.get(node.node_id, {})
        table.add_row(
            shown(node.node_id, 24),
            Text(node.state, style=_STATES.get(MemberState(node.state), "")),
            _Bar(node.used_bytes / max(1, node.capacity_bytes)),
            format_size(node.capacity_bytes),
            *(_disk(node) if has_disks else ()),
            f"{node.blocks:,}",
            rate(_sum(ways, "out ")),
            rate(_sum(ways, "in ")),
        )
    return table


def _disk(node: "NodeStatus") -> tuple[RenderableType, str]:
    disk = next((segment for segment in node.segments if segment.medium == DISK), None)
    if disk is None:
        return "", ""
    if disk.off:
        return Text("off", style="red"), ""
    return _Bar(disk.used_bytes / max(1, disk.capacity_bytes)), format_size(disk.capacity_bytes)


def _namespaces(frame: Frame, most: int) -> Table:
    table = _table("namespace", "|model", "tenant", ">blocks", ">bytes", ">hit rate", ">read", ">stored")
    rates = frame.rates.namespaces
    busiest = sorted(frame.status.usage, key=lambda u: (rates[u.namespace].read_bytes_per_s, u.blocks), reverse=True)
    for usage in busiest[:most]:
        namespace, now = parse_namespace(frame.status.namespaces[usage.namespace].encode()), rates[usage.namespace]
        table.add_row(
            usage.namespace[:8],
            shown(namespace.model, 36),
            shown(namespace.tenant, 16),
            f"{usage.blocks:,}",
            format_size(usage.size_bytes),
            "-" if now.hit_rate is None else f"{now.hit_rate:.1%}",
            rate(now.read_bytes_per_s),
            rate(now.stored_bytes_per_s),
        )
    if len(busiest) > most:
        table.caption = f"and {len(busiest) - most} more: kvpool namespaces"
    return table


def _lists(frame: Frame) -> RenderableType:
    rates = frame.rates
    moved = _per_s("through nodes' sockets", {k: rate(v) for k, v in sorted(rates.moved_bytes_per_s.items())})
    copied = _per_s("copied between nodes", {k: rate(v) for k, v in sorted(rates.copied_bytes_per_s.items())})
    misses = sorted(rates.misses_per_s.items(), key=lambda item: -item[1])
    why = _per_s("look-ups that end early", {reason: f"{count:,.1f}/s" for reason, count in misses})
    return Columns([why, moved, copied], padding=(0, 6))


def _per_s(title: str, rows: Mapping[str, str]) -> RenderableType:
    table = Table(box=None, pad_edge=False, header_style="bright_black")
    table.add_column(title, no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    for name, value in rows.items():
        table.add_row(name, value)
    if not rows:
        table.add_row(Text("none", style="bright_black"), "")
    return table


def _table(*columns: str) -> Table:
    """With a rule below its head; ``>`` marks numbers, ``|`` what may be narrower than it would like."""
    table = Table(
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
        expand=True,
        header_style="bold",
        caption_justify="left",
    )
    for name in columns:
        justify: Literal["left", "right"] = "right" if name.startswith(">") else "left"
        table.add_column(name.lstrip(">|"), justify=justify, no_wrap=not name.startswith("|"))
    return table


def _sum(ways: Mapping[str, float], prefix: str) -> float:
    return sum(size for way, size in ways.items() if way.startswith(prefix))


def _duration(seconds: float) -> str:
    minutes, left_s = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}d {hours}h"
    return f"{hours}h {minutes}m" if hours else f"{minutes}m {left_s}s"
