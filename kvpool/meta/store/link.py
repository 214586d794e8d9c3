"""The way to Redis or Valkey: one server, Sentinel, or Cluster, with the function library that kvpool brings."""

import functools
import hashlib
from collections.abc import Sequence
from importlib import resources
from typing import Any
from urllib.parse import unquote, urlsplit

from kvpool.core.errors import SettingsError, StateAwayError, StateFaultError, UnavailableError

try:
    import redis
    from redis.backoff import NoBackoff
    from redis.cluster import ClusterNode, RedisCluster
    from redis.retry import Retry
    from redis.sentinel import Sentinel
except ImportError:  # an extra
    redis = None  # type: ignore[assignment]

PARTS = ("records", "chains", "removing", "placing", "writing", "reading", "nodes", "functions")
"""Files of the library, in the order in which one builds on another."""

SCHEMES = ("redis", "rediss", "redis+sentinel", "redis+cluster")
POOL = "kvpool:{pool}:"
"""First part of the keys that are of the whole pool."""

CONNECTIONS_MAX = 4_096
"""More than a service has threads: calls never wait for a connection, nor are refused one."""


@functools.cache
def library() -> tuple[str, str]:
    """The library's source and the suffix of its functions' names, so that versions do not meet."""
    folder = resources.files("kvpool.meta.store") / "lua"
    body = "\n".join((folder / f"{part}.lua").read_text() for part in PARTS)
    suffix = "_" + hashlib.sha256(body.encode()).hexdigest()[:8]
    return f"#!lua name=kvpool{suffix}\nlocal SUFFIX = '{suffix}'\n{body}", suffix


class LibraryMissingError(StateAwayError):
    """Redis does not know the functions: it was restarted, or is new to the cluster."""


class RedisLink:
    """Calls to Redis. Thread-safe. All methods that ask it raise StateAwayError when it does not answer.

    Args:
        url: ``redis://[USER@]HOST[:PORT][/DB]`` (``rediss``: over TLS),
            ``redis+sentinel://HOST:PORT,HOST:PORT/NAME`` or ``redis+cluster://HOST:PORT,HOST:PORT``.
        timeout_s: Bound on each call, dialling included.
        password: Of the user, if it needs one.

    Raises:
        SettingsError: Not such a URL, or redis-py is not installed.

    Attributes:
        failures: Calls that failed.
        connects: Connections made: behind a new one may be another server, with other state.
    """

    def __init__(self, url: str, timeout_s: float, password: str | None = None) -> None:
        if redis is None:
            raise SettingsError("redis-py is not installed; install kvpool[redis], or leave --state out")
        self.url = url
        self.failures = 0
        self.connects = 0
        options = {
            "socket_timeout": timeout_s,
            "socket_connect_timeout": timeout_s,
            "protocol": 2,
            "max_connections": CONNECTIONS_MAX,
            "redis_connect_func": self._connected,
            "retry": Retry(NoBackoff(), 0),
        }
        self._client = _client(url, options | ({"password": password} if password is not None else {}))

    @property
    def is_cluster(self) -> bool:
        """Whether keys are spread over several servers."""
        return isinstance(self._client, RedisCluster)

    def call(self, prefix: str, function: str, *arguments: Any) -> Any:
        """A function of the library on the keys that begin with ``prefix``."""
        return self.calls([(prefix, function, arguments)])[0]

    def calls(self, wanted: Sequence[tuple[str, str, Sequence[Any]]]) -> list[Any]:
        """Several calls, on one server in one exchange."""
        suffix = library()[1]
        commands = [("FCALL", f"kvpool_{name}{suffix}", 1, prefix, *args) for prefix, name, args in wanted]
        try:
            return self.run(commands)
        except LibraryMissingError:
            self._load()
            return self.run(commands)

    def run(self, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Plain commands, each on one key (its first or, of FCALL, its third argument)."""
        try:
            if len(commands) == 1:
                return [self._client.execute_command(*commands[0])]
            pipeline = self._client.pipeline(transaction=False)
            for command in commands:
                pipeline.execute_command(*command)
            return list(pipeline.execute())
        except redis.exceptions.RedisError as error:
            raise self._failure(error) from error

    def servers(self) -> list[dict[str, Any]]:
        """``INFO`` of every primary."""
        try:
            if isinstance(self._client, RedisCluster):
                return list(self._client.info(target_nodes=RedisCluster.PRIMARIES).values())
            return [self._client.info()]
        except redis.exceptions.RedisError as error:
            raise self._failure(error) from error

    def keys_of(self, pattern: str) -> list[bytes]:
        """All keys that match, of every primary."""
        try:
            return list(self._client.scan_iter(pattern, count=1000))
        except redis.exceptions.RedisError as error:
            raise self._failure(error) from error

    def close(self) -> None:
        """Close all connections."""
        self._client.close()

    def _load(self) -> None:
        source, _ = library()
        try:
            where = {"target_nodes": RedisCluster.PRIMARIES} if self.is_cluster else {}
            self._client.execute_command("FUNCTION LOAD", "REPLACE", source, **where)
        except redis.exceptions.RedisError as error:
            raise self._failure(error) from error

    def _connected(self, connection: Any) -> None:
        self.connects += 1
        connection.on_connect()

    def _failure(self, error: Exception) -> UnavailableError:
        if "Function not found" in str(error):
            return LibraryMissingError(str(error))
        if isinstance(error, redis.exceptions.OutOfMemoryError):
            return StateFaultError("Redis is full; raise maxmemory there, or give the pool less")
        if "user_function" in str(error):  # this call's own: the state is there for others
            return StateFaultError(f"a function in Redis failed: {error}")
        self.failures += 1
        return StateAwayError(f"the pool's state in {self.url.rpartition('@')[2]} cannot be reached: {error}")


def _client(url: str, options: dict[str, Any]) -> Any:
    parts = urlsplit(url)
    if parts.scheme not in SCHEMES or not parts.netloc:
        raise SettingsError(
            f"state {url!r} is no place; write redis://HOST:PORT, redis+sentinel:// or redis+cluster://"
        )
    if parts.scheme in {"redis", "rediss"}:
        return redis.Redis.from_url(url, **options)
    user, _, places = parts.netloc.rpartition("@")
    if user:
        options["username"] = unquote(user)
    hosts = [_host(url, place) for place in places.split(",")]
    if parts.scheme == "redis+cluster":
        nodes = [ClusterNode(host, port) for host, port in hosts]  # type: ignore[no-untyped-call]
        options["retry"] = Retry(NoBackoff(), 1)  # it must learn of moved slots
        try:
            return RedisCluster(startup_nodes=nodes, **options)
        except redis.exceptions.RedisError as error:
            raise StateAwayError(f"{url.rpartition('@')[2]} cannot be reached: {error}") from error
    name = parts.path.strip("/")
    if not name:
        raise SettingsError(f"state {url!r} names no primary; write redis+sentinel://HOST:PORT/NAME")
    sentinel = Sentinel(hosts, sentinel_kwargs={"socket_timeout": options["socket_timeout"]}, **options)  # type: ignore[no-untyped-call]
    return sentinel.master_for(name)  # type: ignore[no-untyped-call]


def _host(url: str, place: str) -> tuple[str, int]:
    host, _, port = place.rpartition(":")
    if not host or not port.isdigit():
        raise SettingsError(f"{place!r} in {url!r} is no address; write HOST:PORT")
    return host.strip("[]"), int(port)
