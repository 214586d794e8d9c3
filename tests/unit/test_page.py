"""The page of the metadata service: what it answers with, within which bounds, and how often it looks."""

import json
import re
from importlib.resources import files

import numpy as np
import pytest
from fake_node import chain
from http_pages import ask

from kvpool.core.limits import PAGE_BYTES
from kvpool.core.members import MemberSegment
from kvpool.core.namespace import Namespace
from kvpool.meta.page import POLICY, STATE_PATH, people_pages
from kvpool.meta.page_state import FRESH_S, NAME_CHARS_MAX, NAMESPACES_MAX, PageState
from kvpool.meta.server import MetaServer
from kvpool.meta.service import MetaService
from kvpool.ops.http import HttpServer
from kvpool.ops.settings import MetaSettings, TlsSettings
from tests.pki import Pki

HOSTILE = "</script><img src=x onerror=alert(1)>\u2028"


@pytest.fixture
def service(clock):
    service = MetaService(MetaSettings(), clock, np.random.default_rng(1).bytes)
    service.ready(service.join("n0", 1, ("tcp://h:1",), (MemberSegment(b"s" * 16, "shm", 8 * PAGE_BYTES),)))
    return service


@pytest.fixture
def state(service, clock):
    return PageState(service, {"version": "1", "security": "loopback"}, clock)


@pytest.fixture
def address(state):
    server = HttpServer(people_pages(state))
    yield server.start("127.0.0.1", 0)
    server.stop()


def open_namespace(service, model, tenant="t"):
    namespace = Namespace(model=model, block_tokens=1, block_bytes=PAGE_BYTES, tenant=tenant)
    service.open_namespace(namespace.document)
    return namespace


@pytest.mark.parametrize(
    ("path", "content_type"),
    [
        ("/", "text/html; charset=utf-8"),
        ("/page.css", "text/css; charset=utf-8"),
        ("/page.js", "text/javascript; charset=utf-8"),
        (STATE_PATH, "application/json"),
    ],
)
def test_all_of_it_comes_with_the_same_strict_headers(address, path, content_type):
    answer = ask(address, path)

    assert (answer.status, answer.headers["Content-Type"]) == (200, content_type)
    assert answer.headers["Content-Security-Policy"] == POLICY
    assert (answer.headers["X-Content-Type-Options"], answer.headers["Referrer-Policy"]) == ("nosniff", "no-referrer")


@pytest.mark.parametrize("path", ["/page", "/../page.css", "/api/state?all=1", "/web/page.js"])
def test_only_whole_paths_are_known(address, path):
    assert ask(address, path).status == 404


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE"])
def test_nothing_can_be_sent_to_it(address, method):
    answer = ask(address, STATE_PATH, method)

    assert (answer.status, answer.headers["Allow"]) == (405, "GET")


def test_the_files_name_nothing_elsewhere_and_run_no_text_of_others():
    folder = files("kvpool.meta").joinpath("web")
    texts = {name: folder.joinpath(name).read_text(encoding="utf-8") for name in ("page.html", "page.css", "page.js")}

    addresses = {found for text in texts.values() for found in re.findall(r"https?://[^\s\"']+", text)}
    assert addresses == {"http://www.w3.org/2000/svg"}, "the name of SVG, which nobody fetches"
    for sink in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function", "onclick"):
        assert sink not in texts["page.js"]
    assert re.findall(r"<script[^>]*>[^<]", texts["page.html"]) == []


def test_one_record_answers_all_who_ask_within_a_second(service, state, clock):
    first = json.loads(state.encoded())
    open_namespace(service, "m")
    clock.advance(FRESH_S / 2)
    second = json.loads(state.encoded())
    clock.advance(FRESH_S)
    third = json.loads(state.encoded())

    assert second == first
    assert (first["namespaces_total"], third["namespaces_total"]) == (0, 1)


def test_what_is_shown_of_a_pool(service, state):
    namespace = open_namespace(service, HOSTILE)
    packed = b"".join(chain(1, 2))
    service.match(namespace.id, packed, 0, 0.0)

    shown = json.loads(state.encoded())

    assert (shown["version"], shown["security"]) == ("1", "loopback")
    [node] = shown["nodes"]
    assert (node["node_id"], node["state"], node["tiers"][0]["capacity_bytes"]) == ("n0", "ready", 8 * PAGE_BYTES)
    [one] = shown["namespaces"]
    assert (one["model"], one["tenant"], one["asked_blocks"]) == (HOSTILE, "t", 2)
    assert shown["tenants"][0]["tenant"] == "t"
    [miss] = shown["latest_misses"]
    assert (miss["missing"], miss["matched"], miss["asked"]) == (chain(1)[0].hex()[:16], 0, 2)
    assert chain(1)[0].hex() not in json.dumps(shown), "part of a hash tells blocks apart; all of it asks for one"


def test_names_and_namespaces_without_end_are_cut(service, state):
    for i in range(NAMESPACES_MAX + 5):
        open_namespace(service, f"{i}-{'m' * 5000}", tenant=f"t{i}")

    shown = json.loads(state.encoded())

    assert (len(shown["namespaces"]), shown["namespaces_total"]) == (NAMESPACES_MAX, NAMESPACES_MAX + 5)
    assert {len(one["model"]) for one in shown["namespaces"]} == {NAME_CHARS_MAX}
    assert shown["traffic"]["namespaces"] == NAMESPACES_MAX + 5


def test_beyond_loopback_it_is_not_shown_to_anybody_where_callers_are_told_apart(tmp_path):
    """`meta.insecure` opens health and metrics to whoever asks; the page names what all tenants have."""
    tls = TlsSettings(dir=Pki(tmp_path).folder)
    settings = {"grpc_port": 0, "framed_port": 0, "http_port": 0}
    server = MetaServer(MetaSettings(**settings, insecure=True, http_listen="0.0.0.0"), tls=tls)
    server.start()
    try:
        port = server.http_address.rpartition(":")[2]
        answers = {path: ask(f"127.0.0.1:{port}", path).status for path in ("/healthz", "/metrics", "/", STATE_PATH)}
    finally:
        server.stop()

    assert answers == {"/healthz": 200, "/metrics": 200, "/": 501, STATE_PATH: 501}
