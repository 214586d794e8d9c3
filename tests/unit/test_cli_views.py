"""What `kvpool top`, `stat` and `namespaces` print, at each width, without a terminal."""

import io
from collections import deque

import pytest
from rich.console import Console

from kvpool.cli.output import shown
from kvpool.cli.rates import rates_between
from kvpool.cli.stat import record
from kvpool.cli.top_view import bar, rate, sparkline, trouble, view
from kvpool.cli.watching import Frame, frames, parse_interval
from kvpool.client.results import NamespaceStatus, NodeStatus, PoolStatus, RecoveryStatus, SegmentStatus
from kvpool.core.errors import UsageError
from kvpool.core.namespace import Namespace

HOSTILE = "evil\x1b[2J\x07[red]model[/red]\u202e" + "x" * 300


def frame(model="llama", *, disk=True):
    namespace = Namespace(model=model, block_tokens=16, block_bytes=4096)
    medium = [SegmentStatus("ab", "disk", 200, 100, 1)] if disk else []
    nodes = (
        NodeStatus("n0", "ready", 1 << 30, 1 << 29, 12, (), None, tuple(medium), moved_bytes={"out tcp": 5_000_000}),
        NodeStatus("n1", "lost", 1 << 30, 0, 0, (), None, ()),
    )
    status = PoolStatus(
        1,
        "0.1.0",
        {namespace.id.hex(): namespace.document.decode()},
        nodes,
        {"lookups": 4, "blocks_asked": 8, "blocks_matched": 6, "leases": 3, "used_bytes": 1 << 29, "blocks": 12},
        RecoveryStatus(active=False, nodes_reported=1, nodes_expected=1, lasted_s=0.0),
        "insecure",
        (NamespaceStatus(namespace.id.hex(), 12, 49_152, 8, 6, 1_000_000_000, 0),),
        {"evicted": 2},
        2.0,
    )
    return Frame(status, rates_between(None, status))


def drawn(renderable, width, **options):
    out = io.StringIO()
    Console(file=out, width=width, highlight=False, markup=False, **options).print(renderable)
    return out.getvalue()


@pytest.mark.parametrize("width", [80, 120, 200])
def test_top_says_what_matters_at_each_width(width):
    seen = frame()

    text = drawn(view(seen, deque([seen]), "grpc://127.0.0.1:7300", 8), width)

    for said in ("n0", "lost", "75.0%", "500.00 MB/s", "lla", "evicted", "out tcp", "2.50 MB/s", "INSECURE"):
        assert said in text
    assert max(len(line) for line in text.splitlines()) <= width


def test_colours_are_only_for_terminals():
    seen = frame()
    dressed = drawn(view(seen, deque([seen]), "u", 8), 120, force_terminal=True, color_system="standard")

    assert "\x1b[" in dressed
    assert "\x1b[" not in drawn(view(seen, deque([seen]), "u", 8), 120)


def test_what_others_named_moves_no_cursor_and_is_no_markup():
    seen = frame(HOSTILE)

    text = drawn(view(seen, deque([seen]), "u", 8), 120)

    assert not set("\x1b\x07\u202e") & set(text)
    assert "[red]model" in text
    assert len(shown(HOSTILE)) == 60


def test_without_disks_there_is_no_column_for_them():
    seen = frame(disk=False)

    assert "disk" not in drawn(view(seen, deque([seen]), "u", 0), 120)


def test_a_pool_that_is_gone_leaves_its_last_frame_and_the_reason():
    seen = frame()

    text = drawn(trouble("pool is gone", seen, deque([seen]), "u", 8), 120)

    assert text.startswith("pool is gone")
    assert "n0" in text


def test_bars_lines_and_rates():
    assert bar(0.5, 4).plain == "██··  50%"
    assert bar(7.0, 4).plain == "████ 100%"
    assert sparkline([0.0, None, 0.5, 1.0], 1.0) == "▁ ▅█"
    assert sparkline([]) == ""
    assert [rate(5), rate(5_000), rate(5e6), rate(5.25e9)] == ["5 B/s", "5.00 kB/s", "5.00 MB/s", "5.25 GB/s"]


def test_a_record_for_programs_has_gauges_and_rates():
    said = record(frame())

    assert (said["nodes"], said["nodes_ready"], said["hit_rate"], said["lookups_per_s"]) == (2, 1, 0.75, 2.0)
    assert said["misses_per_s"] == {"evicted": 1.0}


class Answering:
    """A pool of which only the status is asked."""

    def __init__(self):
        self.asked = 0

    def status(self):
        self.asked += 1
        return frame().status


def test_frames_end_after_their_count_or_when_somebody_has_enough():
    pool, pauses = Answering(), []

    assert len(list(frames(pool, 1.0, 2, lambda seconds: pauses.append(seconds) or True))) == 2
    assert len(pauses) == 1
    assert pool.asked == 2
    assert len(list(frames(pool, 1.0, None, lambda seconds: False))) == 1


@pytest.mark.parametrize("text", ["0", "1ms", "2h", "-1s", "soon"])
def test_intervals_that_make_no_sense(text):
    with pytest.raises(UsageError):
        parse_interval(text)
