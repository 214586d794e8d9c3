"""`kvpool doctor`: checks a host, and what it can see of a pool, and says how to put right what it finds."""

from typing import Annotated

import typer
from rich.console import Group, RenderableType
from rich.text import Text

from kvpool.cli import with_settings
from kvpool.cli.checks import devices, host, pool, tls
from kvpool.cli.checks.finding import Finding, Verdict
from kvpool.cli.connecting import CLIENT_TLS_KEYS, connect_operator
from kvpool.cli.output import Format, UnhealthyError, emit, table
from kvpool.core.errors import KvpoolError
from kvpool.ops.addresses import split_address
from kvpool.ops.settings import Settings, is_loopback

_KEYS = (
    "client.pool",
    "client.timeout_s",
    "client.transports",
    "node.node_id",
    "node.size",
    "node.segment_dir",
    "node.hugepages",
    "node.ucx",
    "node.vram",
    "node.disk",
    "node.disk_size",
)

Strict = Annotated[bool, typer.Option("--strict", help="Exit with 4 for warnings too.")]


@with_settings(*_KEYS, *CLIENT_TLS_KEYS)
def doctor(settings: Settings, output: Format, *, strict: Strict = False) -> None:
    """Check this host and the pool: memory, limits, devices, ports, clock, versions, hash settings, certificates.

    Give it the flags, environment and file that the roles here get. Each finding is ok, warn or fail, with the fix.
    Exit with 4 when there is a fail. A pool that does not answer is a warning: there may be none yet.
    """
    findings = _examine(settings)
    counts = {verdict: sum(finding.verdict is verdict for finding in findings) for verdict in Verdict}
    emit({"findings": findings, "counts": counts}, output, _view(findings))
    bad = counts[Verdict.FAIL] + (counts[Verdict.WARN] if strict else 0)
    if bad:
        raise UnhealthyError(f"{bad} of {len(findings)} checks need attention; each says what to do")


def _examine(settings: Settings) -> list[Finding]:
    pool_host = split_address(settings.client.pool.removeprefix("grpc://").partition(",")[0])[0]
    certificates = list(tls.check_tls(settings, pool_host))
    answer = _ask(settings)
    pool_is_here = answer.status is not None and is_loopback(pool_host)
    return [
        *host.check_host(settings, host.gather(settings), pool_is_here=pool_is_here),
        *devices.check_devices(settings, devices.gather()),
        *certificates,
        *pool.check_pool(answer),
    ]


def _ask(settings: Settings) -> pool.PoolFacts:
    uri = settings.client.pool
    try:
        with connect_operator(settings) as client:
            asked_at_s = pool.time_of_day_s()
            status = client.status()
            return pool.judge_answer(uri, status, asked_at_s, pool.time_of_day_s())
    except KvpoolError as error:
        return pool.silent_pool(uri, str(error))


def _view(findings: list[Finding]) -> RenderableType:
    styles = {Verdict.OK: "green", Verdict.WARN: "yellow", Verdict.FAIL: "bold red"}
    rows = table(("", "check", "seen"), [])
    for finding in findings:
        seen = Text(finding.seen)
        if finding.fix:
            seen.append(f"\nfix: {finding.fix}", style="bold")
        rows.add_row(Text(finding.verdict, style=styles[finding.verdict]), finding.check, seen)
    said = ", ".join(f"{n} {v}" for v in Verdict if (n := sum(f.verdict is v for f in findings)))
    return Group(rows, said)
