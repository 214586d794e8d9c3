"""Asking a role's HTTP pages."""

import http.client
from typing import NamedTuple


class Answer(NamedTuple):
    status: int
    text: str
    headers: dict[str, str]


def ask(address: str, path: str, method: str = "GET", timeout_s: float = 10.0) -> Answer:
    """One request to ``host:port``."""
    connection = http.client.HTTPConnection(address.removeprefix("http://"), timeout=timeout_s)
    try:
        connection.request(method, path)
        answer = connection.getresponse()
        return Answer(answer.status, answer.read().decode(), dict(answer.getheaders()))
    finally:
        connection.close()


def metrics(address: str) -> dict[str, float]:
    """What a role shows Prometheus: values by ``name`` or ``name{label="value"}``."""
    lines = ask(address, "/metrics").text.splitlines()
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))}
