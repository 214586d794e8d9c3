"""The audit trail: changes are lines, uses and repeated refusals are sums, and nothing secret is in either."""

import json

import pytest

from kvpool.core.errors import SettingsError
from kvpool.core.principals import Principal, Role, anyone
from kvpool.ops.audit import SUMMED_S, SUMS_MAX, Audit, open_audit

ENGINE = Principal("engine", frozenset({Role.CLIENT}), "acme")


@pytest.fixture
def lines():
    return []


@pytest.fixture
def audit(lines, clock):
    return Audit(lambda **fields: lines.append(fields), clock)


def test_a_change_is_a_line(audit, lines):
    audit.record("pinned", ENGINE, block="00ff00ff")

    assert lines == [{"action": "pinned", "by": "engine", "roles": "client", "tenant": "acme", "block": "00ff00ff"}]


def test_uses_are_summed_up_for_each_caller(audit, lines, clock):
    for _ in range(100):
        audit.used(ENGINE, located_blocks=2, located_bytes=8)
    audit.used(anyone("pid:7"), stored_blocks=1, stored_bytes=4)
    assert lines == []

    clock.advance(SUMMED_S)
    audit.flush(due=True)

    assert [(line["by"], line["roles"]) for line in lines] == [("engine", "client"), ("pid:7", "any")]
    assert (lines[0]["located_blocks"], lines[0]["located_bytes"], lines[1]["stored_bytes"]) == (200, 800, 4)
    audit.flush()
    assert len(lines) == 2


def test_the_first_refusal_of_a_kind_is_a_line_and_the_others_a_sum(audit, lines):
    for _ in range(5):
        audit.refused(ENGINE, "Drain", "not for clients")
        audit.refused("127.0.0.1:4711", "connection", "who calls?")

    assert [(line.get("by"), line.get("peer"), line["what"]) for line in lines] == [
        ("engine", None, "Drain"),
        (None, "127.0.0.1:4711", "connection"),
    ]
    audit.close()
    assert [line["more"] for line in lines[2:]] == [4, 4]
    audit.refused(ENGINE, "Drain", "after the end")
    assert len(lines) == 4


def test_a_crowd_of_callers_takes_no_more_than_its_share_of_memory(audit, lines):
    for number in range(SUMS_MAX + 1):
        audit.used(anyone(f"pid:{number}"), located_blocks=1)

    assert len(lines) == SUMS_MAX


def test_a_file_gets_json_that_only_its_owner_reads(tmp_path):
    path = tmp_path / "audit.log"
    audit = open_audit(str(path), authenticated=False)
    audit.record("drain", ENGINE, node="n0")
    audit.close()

    [line] = map(json.loads, path.read_text().splitlines())
    assert (line["event"], line["action"], line["node"]) == ("audit", "drain", "n0")
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("setting", "authenticated", "is_on"),
    [("auto", True, True), ("auto", False, False), ("on", False, True), ("off", True, False)],
)
def test_it_is_on_where_it_was_asked_for_or_callers_are_known(setting, authenticated, is_on):
    assert open_audit(setting, authenticated=authenticated).is_on is is_on


def test_a_file_that_cannot_be_written_is_refused(tmp_path):
    with pytest.raises(SettingsError, match="name a file that can be appended to"):
        open_audit(str(tmp_path / "none" / "audit.log"), authenticated=True)
