"""`kvpool bench compare`: what counts as fallen, and what is not compared."""

import importlib
import json
import pkgutil

import msgspec
import pytest

import kvpool.bench
from kvpool.bench.compare import MEASURES
from kvpool.cli.main import main

GET = {"bench": "transfer", "transport": "shm", "op": "get", "block_bytes": 65536, "ratio": 0.8, "gbps": 9.0}
MEMORY = {"bench": "directory_memory", "blocks": 1000, "bytes_per_block": 250.0, "bytes_per_copy": 40.0}


@pytest.fixture
def compared(tmp_path, capsys):
    def compared(before: list[dict], after: list[dict], *options: str) -> tuple[int, list[dict]]:
        for name, rows in (("before", before), ("after", after)):
            (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
        files = [str(tmp_path / "before"), str(tmp_path / "after")]
        code = main(["bench", "compare", *files, *options, "--format", "json"])
        return code, json.loads(capsys.readouterr().out)

    return compared


def test_a_ratio_that_fell_beyond_the_tolerance_is_flagged(compared):
    code, [change] = compared([GET], [GET | {"ratio": 0.71}])
    assert code == 1
    assert (change["measure"], change["before"], change["after"], change["fell"]) == ("ratio", 0.8, 0.71, True)


def test_noise_and_gains_are_not(compared):
    code, changes = compared([GET, MEMORY], [MEMORY | {"bytes_per_block": 200.0}, GET | {"ratio": 0.73}])
    assert code == 0
    assert [change["fell"] for change in changes] == [False] * 3


def test_what_should_be_small_falls_by_growing(compared):
    code, changes = compared([MEMORY], [MEMORY | {"bytes_per_copy": 45.0}])
    assert code == 1
    assert [change["measure"] for change in changes if change["fell"]] == ["bytes_per_copy"]


def test_a_row_that_is_gone_has_fallen(compared):
    code, [change] = compared([GET], [GET | {"op": "put"}])
    assert code == 1
    assert change["after"] is None


def test_speeds_of_the_machine_are_compared_when_asked_only(compared):
    slower = GET | {"gbps": 4.0}
    assert compared([GET], [slower])[0] == 0
    assert compared([GET], [slower], "--timed")[0] == 1
    assert compared([GET], [slower], "--timed", "--tolerance", "0.6")[0] == 0


@pytest.mark.parametrize(
    ("text", "complaint"),
    [("[]\n", "line 1"), ('{"ratio": 1}\n', "no 'bench'"), ("{", "line 1"), ("", "nothing to compare")],
)
def test_a_file_of_something_else_is_refused_by_line(text, complaint, tmp_path, capsys):
    path = tmp_path / "rows"
    path.write_text(text)
    assert main(["bench", "compare", str(path), str(path)]) == 2
    assert complaint in capsys.readouterr().err


def test_every_field_that_is_compared_is_one_of_its_rows():
    kinds = {}
    for module in pkgutil.iter_modules(kvpool.bench.__path__, "kvpool.bench."):
        for value in vars(importlib.import_module(module.name)).values():
            if isinstance(value, type) and issubclass(value, msgspec.Struct) and value.__struct_config__.tag:
                kinds[value.__struct_config__.tag] = set(value.__struct_fields__)
    for bench, measures in MEASURES.items():
        assert {*measures.names, *measures.steady, *measures.timed} <= kinds[bench], bench
