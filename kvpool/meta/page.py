"""The page of the metadata service: three files that never change, and the record that they draw.

Everything that is drawn comes from the record, as text; the headers let the page load nothing from anywhere else, and
run nothing that is not one of its files.
"""

from functools import partial
from http import HTTPStatus
from importlib.resources import files

from kvpool.meta.page_state import PageState
from kvpool.ops.http import Page, Pages

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)

HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}

_FILES = {
    "/": ("page.html", "text/html; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
}

STATE_PATH = "/api/state"


def people_pages(state: PageState) -> Pages:
    """The page, its files and its record, by path."""
    folder = files("kvpool.meta").joinpath("web")
    static = {
        path: Page(HTTPStatus.OK, folder.joinpath(name).read_bytes(), content_type, HEADERS)
        for path, (name, content_type) in _FILES.items()
    }
    pages: Pages = {path: partial(_same, page) for path, page in static.items()}
    pages[STATE_PATH] = lambda: Page(HTTPStatus.OK, state.encoded(), "application/json", HEADERS)
    return pages


def no_pages(why: str) -> Pages:
    """In place of the page and its record: why there is none."""
    text = f"there is no page here: {why}; see `kvpool status`, `kvpool top` and /metrics\n"
    page = Page(HTTPStatus.NOT_IMPLEMENTED, text.encode(), "text/plain; charset=utf-8", HEADERS)
    return {path: partial(_same, page) for path in (*_FILES, STATE_PATH)}


def _same(page: Page) -> Page:
    return page
