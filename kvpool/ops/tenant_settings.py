"""Settings of tenants: what each may hold and ask for."""

from typing import Annotated

import yaml
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, model_validator

from kvpool.core.tenants import TenantLimits, check_name
from kvpool.core.units import parse_size


def _flow(value: object) -> object:
    """A mapping, or the text of one as environment variables have it."""
    if not isinstance(value, str):
        return value
    try:
        return yaml.safe_load(value)
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError("is no YAML; write e.g. {acme: {bytes: 64GiB, share: 2}}") from error


def _size(value: object) -> object:
    return parse_size(value) if isinstance(value, str) and value != "none" else _none(value)


def _none(value: object) -> object:
    return None if value == "none" else value


class TenantSettings(BaseModel):
    """Limits of a tenant; null, or none, is no limit."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    bytes: Annotated[int | None, BeforeValidator(_size)] = None
    """Memory that its blocks may take, e.g. 64GiB; beyond it, its oldest blocks make room for its new ones."""

    share: float = 1.0
    """Its weight when the pool is full and tenants compete for it."""

    pins: Annotated[int | None, BeforeValidator(_none)] = None
    """Blocks that may be pinned at a time."""

    lookups_per_s: Annotated[float | None, BeforeValidator(_none)] = None
    """Look-ups a second; more are misses."""

    writes_per_s: Annotated[float | None, BeforeValidator(_none)] = None
    """New blocks a second; more are not wanted."""

    @property
    def limits(self) -> TenantLimits:
        """As the directory takes them."""
        return TenantLimits(**dict(self))

    @model_validator(mode="after")
    def _possible(self) -> "TenantSettings":
        assert self.limits
        return self


TenantName = Annotated[str, AfterValidator(check_name)]
TenantsByName = Annotated[dict[TenantName, TenantSettings], BeforeValidator(_flow)]
AnyTenant = Annotated[TenantSettings, BeforeValidator(_flow)]
