"""The page in a real Chromium, on a pool that other tests use too: numbers that move, and nothing that should not."""

import json
import os

import pytest

from tests.chromium import Browser, find_chromium
from tests.integration.conftest import blank, open_blocks, random_blocks, random_chain
from tests.waiting import eventually

HOSTILE = "<img src=x onerror=document.title='owned'>"

pytestmark = pytest.mark.skipif(find_chromium() is None, reason="chromium is not installed")


@pytest.fixture(scope="module")
def browser():
    with Browser() as browser:
        yield browser


def test_the_page_shows_a_pool_at_work(pool, rng, browser):
    """A model's name is HTML; the namespace is one that nobody else uses."""
    tenant = f"tenant-{os.urandom(4).hex()}"
    keyspace, chain = open_blocks(pool.connect(), model=HOSTILE, tenant=tenant), random_chain(6)
    keyspace.store(chain[:4], list(random_blocks(rng, 4)))
    address = pool.meta_ready["http"]

    browser.open(f"{address}/")
    eventually(lambda: tenant in browser.evaluate("document.body.innerText"))
    rows = (
        f"[...document.querySelectorAll('#tenants tr')].find((row) => row.textContent.includes('{tenant}')).innerText"
    )
    assert browser.evaluate(rows).split() == [tenant, "1", "4", "256", "KiB", "\N{EN DASH}", "0", "B"]
    keyspace.match(chain)
    keyspace.load(chain[:4], blank(4))

    eventually(lambda: browser.evaluate(rows).split() == [tenant, "1", "4", "256", "KiB", "66.7%", "256", "KiB"])
    eventually(lambda: chain[4].hex()[:16] in browser.evaluate("document.querySelector('#misses').innerText"))
    assert browser.evaluate("document.querySelector('#nodes').innerText").startswith("n0")
    assert HOSTILE in browser.evaluate("document.querySelector('#misses').innerText")
    assert browser.evaluate("[document.title, document.images.length]") == ["kvpool", 0]
    assert browser.errors == []
    assert {url.removeprefix(address) for url in browser.requested} == {"/", "/page.css", "/page.js", "/api/state"}


def test_the_policy_keeps_scripts_of_others_out(pool, browser):
    """Were some text of others to become an element after all, it would not run."""
    browser.open(f"{pool.meta_ready['http']}/")
    eventually(lambda: "nodes ready" in browser.evaluate("document.querySelector('#verdict').textContent"))

    browser.evaluate(f"document.querySelector('#heads').innerHTML = {json.dumps(HOSTILE)}; 1")
    eventually(lambda: any("Content Security Policy" in error for error in browser.errors))

    assert browser.evaluate("document.title") == "kvpool"
