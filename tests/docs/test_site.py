"""The documentation as a site: it builds without a warning, asks no other host for anything, and is up to date."""

import os
import re
import subprocess
import sys

import pytest

from kvpool.cli.reference import pages
from tests.docs.blocks import PAGES, ROOT

_FETCHED = re.compile(
    r"<(?:script|img|iframe|source)[^>]+src=[\"']?(?:https?:)?//[^\"' >]+|<link[^>]+href=[\"']?https?://[^>]+"
)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert built.returncode == 0, built.stderr
    assert "not included in the" not in built.stderr, "every page has a place in mkdocs.yml"
    return folder


def test_every_page_is_there(site):
    for page in PAGES:
        if page.parent != ROOT:
            assert (site / page.relative_to(ROOT / "docs")).with_suffix(".html").exists()


def test_nothing_is_fetched_from_another_host(site):
    for page in site.rglob("*.html"):
        assert _FETCHED.findall(page.read_text(encoding="utf-8")) == [], page


def test_notes_for_the_tests_are_not_seen_by_readers(site):
    text = (site / "quickstart.html").read_text(encoding="utf-8")

    assert "<!-- stays -->" in text
    assert "&lt;!-- stays" not in text
    assert 'class="language-console highlight"' in text


def test_pages_made_of_the_commands_are_up_to_date():
    stale = [path for path, text in pages().items() if (ROOT / path).read_text(encoding="utf-8") != text]

    assert stale == [], "run `make docs-generated`"
