"""What `kv_connector_extra_config` may say, checked before the engine starts."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kvpool import SettingsError, TlsSettings
from kvpool.core.units import parse_size

MODEL_CONFIG = ConfigDict(extra="forbid", frozen=True)


class LocalNodeConfig(BaseModel):
    """A store node that the connector starts on its host, and that outlives the engine.

    Attributes:
        size: Host memory it gives to the pool, e.g. ``64GiB``.
    """

    model_config = MODEL_CONFIG
    size: str


class ConnectorConfig(BaseModel):
    """The connector's settings.

    Attributes:
        pool: The pool's metadata service.
        transports: Ways to move blocks, best first.
        streams: Threads or connections of one large transfer.
        tenant: Whose blocks these are; engines of different tenants share nothing.
        epoch: Raised by an operator to forget everything saved before.
        model: Name of the model in the pool; by default the engine's own, without its folder.
        save_decode: Save generated tokens' blocks too, for the next turn of a conversation; else only the prompt's.
        step_budget_s: Time that one scheduling step may wait for lookups, all its requests together.
        lookup_timeout_s: After this a lookup counts as a miss.
        lease_s: How long matched blocks are held for a request that is waiting for its turn.
        load_timeout_s: After this a load counts as failed, and its tokens are recomputed.
        save_timeout_s: After this a save is given up.
        save_pinned_fraction: Share of the engine's KV blocks that saves may hold at a time.
        load_threads: Loads that run at a time in each worker.
        save_threads: Saves that run at a time in each worker.
        local_node: A store node to start on this host.
        tls: Certificates for a pool with TLS, e.g. ``{"dir": "/etc/kvpool/tls"}``; a token only as a file.
    """

    model_config = MODEL_CONFIG
    pool: str = "grpc://127.0.0.1:7300"
    transports: tuple[Literal["cuda", "shm", "ucx", "tcp", "unix"], ...] = ("shm", "tcp")
    streams: int = Field(default=2, ge=1, le=64)
    tenant: str = Field(default="default", min_length=1, max_length=256)
    epoch: int = Field(default=0, ge=0, lt=1 << 31)
    model: str = Field(default="", max_length=512)
    save_decode: bool = True
    step_budget_s: float = Field(default=0.001, ge=0, le=0.1)
    lookup_timeout_s: float = Field(default=0.2, gt=0, le=10)
    lease_s: float = Field(default=5, gt=0, le=60)
    load_timeout_s: float = Field(default=10, gt=0, le=600)
    save_timeout_s: float = Field(default=10, gt=0, le=600)
    save_pinned_fraction: float = Field(default=0.25, gt=0, le=1)
    load_threads: int = Field(default=2, ge=1, le=64)
    save_threads: int = Field(default=1, ge=1, le=64)
    local_node: LocalNodeConfig | None = None
    tls: TlsSettings | None = None


def parse_config(extra: dict[str, Any]) -> ConnectorConfig:
    """The settings in ``kv_connector_extra_config``.

    Raises:
        SettingsError: A key that is not known, or a value that cannot be; names both.
    """
    try:
        config = ConnectorConfig.model_validate(extra)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(str(part) for part in first["loc"])
        known = ", ".join(ConnectorConfig.model_fields)
        value = "(not shown)" if key.startswith("tls") else repr(first["input"])
        raise SettingsError(
            f"kv_connector_extra_config: {key} = {value}: {first['msg']}; known keys: {known}"
        ) from error
    if config.local_node is not None:
        parse_size(config.local_node.size)
    if config.tls is not None and config.tls.token is not None:
        raise SettingsError("kv_connector_extra_config: tls.token would be in vLLM's logs; name a tls.token_file")
    if not config.pool.startswith("grpc://"):
        raise SettingsError(f"kv_connector_extra_config: pool = {config.pool!r}; write grpc://HOST:PORT")
    return config
