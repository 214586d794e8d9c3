"""Every command in the documentation is run as it stands, and prints what it is said to print; or says why not."""

import pytest

from tests.docs.blocks import PAGES, ROOT, Step, blocks_of, pattern_of, wants_pool
from tests.docs.sandbox import Sandbox, why_not

BLOCKS = {page: blocks_of(page) for page in PAGES}
RUN = [page for page, blocks in BLOCKS.items() if any(block.is_run() for block in blocks)]
NOT_RUN = [block for blocks in BLOCKS.values() for block in blocks if block.why_not]


def test_every_block_with_commands_is_one_that_is_run_or_says_why_not():
    neither = [
        block.name
        for blocks in BLOCKS.values()
        for block in blocks
        if block.has_commands() and not (block.is_run() or block.why_not)
    ]

    assert neither == [], "make each ```console with `$ ` before its commands; see tests/docs/blocks.py"


def test_every_console_block_begins_with_a_command():
    console = [block for blocks in BLOCKS.values() for block in blocks if block.language == "console"]

    assert [block.name for block in console if not block.text.startswith("$ ")] == []


@pytest.mark.parametrize("block", NOT_RUN, ids=lambda block: block.name)
def test_what_is_not_run(block):
    pytest.skip(f"{block.name} is not run: {block.why_not}")


@pytest.mark.parametrize("page", RUN, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_is_run(page, tmp_path):
    if reason := why_not():
        pytest.skip(reason)
    with Sandbox(tmp_path) as machine:
        if wants_pool(page):
            machine.start(Step("kvpool up --size 64MiB", "kvpool ..."))
        for block in filter(lambda block: block.is_run(), BLOCKS[page]):
            if block.stays == "stays alone":
                machine.stop()
            if block.language == "python":
                machine.run_python(block.text)
                continue
            for step in block.steps():
                (machine.start if block.stays else machine.run)(step)


@pytest.mark.parametrize(
    ("shown", "printed"),
    [
        ("took 0.31 ms", "took 12 ms"),
        ("1,024 blocks of 64 KiB", "1,024 blocks of 128 KiB"),
        ("id 5b0f1c9a2d7e4c11 ...", "id aaaabbbbccccdddd and more\nlines"),
        ("a ──── b", "a ── b"),
    ],
)
def test_measured_values_may_differ(shown, printed):
    assert pattern_of(shown).fullmatch(printed)


@pytest.mark.parametrize(("shown", "printed"), [("16 of 16 blocks", "15 of 16 blocks"), ("ready", "not ready")])
def test_anything_else_may_not(shown, printed):
    assert not pattern_of(shown).fullmatch(printed)
