"""The image's health check: whether the role in this container is alive, or ready with ``/readyz`` as the argument.

Without kvpool, whose start would cost a core for half a second each time.
"""

import http.client
import sys

PORTS = (7302, 7312)  # a container runs one role: the metadata service, or a node


def status(port: int, path: str) -> int | None:
    """What a role here answers; None when there is none on this port."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=2)
    try:
        connection.request("GET", path)
        return connection.getresponse().status
    except ConnectionRefusedError:
        return None
    finally:
        connection.close()


if __name__ == "__main__":
    path = sys.argv[1] if len(sys.argv) > 1 else "/healthz"
    sys.exit(0 if 200 in (status(port, path) for port in PORTS) else 1)
