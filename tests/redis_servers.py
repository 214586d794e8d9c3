"""Redis as the tests need it: real servers on free ports, in folders of their own."""

import socket
import subprocess
from pathlib import Path

import redis
from waiting import eventually


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


class RedisServer:
    """One `redis-server`. Starts empty, unless its folder holds a dump."""

    def __init__(self, folder: Path, *options: str, port: int | None = None) -> None:
        self.port = port or free_port()
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        where = ("--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(folder), "--save", "")
        with (folder / "log").open("ab") as log:
            self.process = subprocess.Popen(["redis-server", *where, *options], stdout=log, stderr=log)
        self.client = redis.Redis(port=self.port, protocol=2)
        eventually(self.answers)

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    def answers(self) -> bool:
        try:
            return bool(self.client.ping())
        except redis.exceptions.RedisError:
            return False

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self.client.close()
