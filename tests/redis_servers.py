"""Redis as the tests need it: real servers on free ports, in folders of their own."""

import socket
import subprocess
from pathlib import Path

import redis
from waiting import eventually


def free_port(below: int = 65_536) -> int:
    """A port that is free now; of a cluster's server the one 10,000 above it is taken too."""
    while True:
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            port = sock.getsockname()[1]
        if port < below:
            return port


class RedisServer:
    """One `redis-server`. Starts empty, unless its folder holds a dump."""

    def __init__(self, folder: Path, *options: str, port: int | None = None, config: tuple[str, ...] = ()) -> None:
        self.port = port or free_port()
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        where = ("--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(folder))
        if not config:
            options = (*options, "--save", "")
        with (folder / "log").open("ab") as log:
            self.process = subprocess.Popen(["redis-server", *config, *where, *options], stdout=log, stderr=log)
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


class RedisCluster:
    """So many masters, without replicas, that share the slots."""

    def __init__(self, folder: Path, masters: int) -> None:
        options = ("--cluster-enabled", "yes", "--cluster-require-full-coverage", "yes")
        self.servers = [RedisServer(folder / str(i), *options, port=free_port(below=50_000)) for i in range(masters)]
        first, slots = self.servers[0], 16_384
        for i, server in enumerate(self.servers):
            low, high = slots * i // masters, slots * (i + 1) // masters - 1
            server.client.execute_command("CLUSTER ADDSLOTSRANGE", low, high)
            server.client.execute_command("CLUSTER SET-CONFIG-EPOCH", i + 1)
            first.client.execute_command("CLUSTER MEET", "127.0.0.1", server.port)
        eventually(lambda: all(self._knows_all(server) for server in self.servers))

    @property
    def url(self) -> str:
        return "redis+cluster://" + ",".join(f"127.0.0.1:{server.port}" for server in self.servers)

    def kill(self) -> None:
        for server in self.servers:
            server.kill()

    def _knows_all(self, server: RedisServer) -> bool:
        info = server.client.execute_command("CLUSTER INFO")
        text = info if isinstance(info, dict) else dict(line.split(":") for line in info.decode().split())
        return text["cluster_state"] == "ok" and int(text["cluster_known_nodes"]) == len(self.servers)


class Watched:
    """A primary, a replica, and a Sentinel that lets it take over."""

    def __init__(self, folder: Path) -> None:
        self.primary = RedisServer(folder / "primary", "--repl-diskless-sync-delay", "0")
        follows = ("--replicaof", f"127.0.0.1 {self.primary.port}")
        self.replica = RedisServer(folder / "replica", *follows)
        eventually(lambda: self.replica.client.info("replication")["master_link_status"] == "up")
        watching = folder / "sentinel.conf"
        watching.write_text(
            f"sentinel monitor pool 127.0.0.1 {self.primary.port} 1\n"
            "sentinel down-after-milliseconds pool 300\nsentinel failover-timeout pool 3000\n"
        )
        self.sentinel = RedisServer(folder / "sentinel", config=(str(watching), "--sentinel"))
        eventually(lambda: self._master()[b"num-slaves"] == b"1")

    @property
    def url(self) -> str:
        return f"redis+sentinel://127.0.0.1:{self.sentinel.port}/pool"

    def kill(self) -> None:
        for server in (self.sentinel, self.replica, self.primary):
            server.kill()

    def _master(self) -> dict[bytes, bytes]:
        flat = self.sentinel.client.connection_pool.get_connection()
        try:
            flat.send_command("SENTINEL", "MASTER", "pool")
            found = flat.read_response()
        finally:
            self.sentinel.client.connection_pool.release(flat)
        return dict(zip(found[::2], found[1::2], strict=True))
