"""Makes the pictures of the documentation: `make screenshots`. A real pool, real engines, a real browser."""

import os
import sys
import tempfile
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from rich.console import Console

import kvpool
from kvpool.bench.process import RoleProcess
from kvpool.cli.top_view import HISTORY, History, view
from kvpool.cli.watching import frames, sleep
from tests.chromium import Browser, find_chromium
from tests.traffic import ENGINES, Traffic

FOLDER = Path(__file__).parent
LOAD_S = 110
COLUMNS = 128
URI = "grpc://127.0.0.1:7300"
"""What the pictures call the pool, whichever port it has."""

NODES = {"node-1": "512MiB", "node-2": "384MiB", "node-3": "384MiB"}
DISK_NODE = "node-1"

# As rich draws it, without the fonts that it would fetch from elsewhere.
SVG = """<svg class="rich-terminal" viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{
  font-family: "DejaVu Sans Mono", Menlo, Consolas, monospace;
  font-size: {char_height}px; line-height: {line_height}px;
}}
.{unique_id}-title {{ font-size: 18px; font-weight: bold; font-family: "DejaVu Sans", sans-serif; }}
{styles}
</style>
<defs>
<clipPath id="{unique_id}-clip-terminal">
<rect x="0" y="0" width="{terminal_width}" height="{terminal_height}"/>
</clipPath>
{lines}
</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">{matrix}</g>
</g>
</svg>
"""


def main() -> None:
    """Start all of it, wait until there is something to see, and draw."""
    if find_chromium() is None:
        sys.exit("chromium is not installed: apt-get install chromium")
    with _pool() as (uri, address), Traffic(uri, ENGINES) as traffic, Browser() as light, Browser() as dark:
        light.open(f"{address}/")
        dark.open(f"{address}/", dark=True)
        svg = _watch(uri)
        light.picture(FOLDER / "page-light.png")
        dark.picture(FOLDER / "page-dark.png")
    assert not traffic.failed
    _photograph(svg, FOLDER / "top.png")


@contextmanager
def _pool() -> Iterator[tuple[str, str]]:
    """A metadata service and some nodes: where the pool and its page are."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm")))
        options: dict[str, object] = {"grpc-port": 0, "framed-port": 0, "http-port": 0, "expected-nodes": len(NODES)}
        ready = stack.enter_context(RoleProcess("meta", options, folder / "meta.log")).ready()
        for name, size in NODES.items():
            options = {"meta": ready["uri"], "node-id": name, "size": size, "segment-dir": folder, "data-port": 0}
            options |= {"grpc-port": 0, "unix-socket": folder / f"{name}.sock"}
            if name == DISK_NODE:
                disk = stack.enter_context(tempfile.TemporaryDirectory())
                options |= {"disk": disk, "disk-size": "1GiB"}
            stack.enter_context(RoleProcess("node", options, folder / f"{name}.log")).ready()
        yield ready["uri"], ready["http"]


def _watch(uri: str) -> str:
    """What `kvpool top` draws at the end of the load."""
    history: History = deque(maxlen=HISTORY)
    with kvpool.connect(uri) as pool:
        for frame in frames(pool, 1.0, LOAD_S, sleep):
            history.append(frame)
    with Path(os.devnull).open("w", encoding="utf-8") as nowhere:
        console = Console(record=True, width=COLUMNS, file=nowhere, force_terminal=True, color_system="truecolor")
        console.print(view(history[-1], history, URI, 8))
        return console.export_svg(title="kvpool top", code_format=SVG)


def _photograph(svg: str, path: Path) -> None:
    with tempfile.TemporaryDirectory() as folder, Browser(width=1280, height=400) as browser:
        page = Path(folder) / "top.html"
        page.write_text(f"<!doctype html><body style='margin:0'>{svg}", encoding="utf-8")
        browser.open(page.as_uri())
        browser.picture(path)


if __name__ == "__main__":
    main()
