"""The public surface: its names are frozen, and each says what it is."""

import dataclasses
import importlib
import importlib.util
import inspect
import pkgutil
import re
from pathlib import Path

import msgspec
import pytest

import kvpool
from kvpool.core import errors

NAMES = [
    "AsyncClient",
    "AsyncKeyspace",
    "AuthenticationError",
    "CapacityError",
    "Client",
    "ClientStats",
    "DrainStatus",
    "ClosedError",
    "DeadlineError",
    "FieldDifference",
    "ForbiddenError",
    "InvalidBufferError",
    "InvalidHashError",
    "InvalidNamespaceError",
    "Keyspace",
    "KvpoolError",
    "LoadResult",
    "Match",
    "MissReason",
    "Namespace",
    "NamespaceMismatchError",
    "NodeStatus",
    "OverloadedError",
    "PoolStatus",
    "ProtocolError",
    "QuotaError",
    "Reservation",
    "SegmentStatus",
    "SettingsError",
    "StaleGrantError",
    "StoreResult",
    "TenantStatus",
    "TlsSettings",
    "UnavailableError",
    "UnknownNamespaceError",
    "UsageError",
    "Want",
    "WriteResult",
    "__version__",
    "chain_hashes",
    "connect",
    "connect_async",
]

METHODS = {
    "Client": {
        "namespace",
        "status",
        "stats",
        "collector",
        "drain",
        "drain_status",
        "cancel_drain",
        "set_quota",
        "close",
    },
    "Keyspace": {"match", "release", "load", "store", "reserve", "write", "abort", "tracer"},
}
"""All that these classes let callers do."""

RECORDS = [
    "ClientStats",
    "DrainStatus",
    "LoadResult",
    "Match",
    "NodeStatus",
    "PoolStatus",
    "Reservation",
    "SegmentStatus",
    "StoreResult",
    "TenantStatus",
]
RECORDS += ["WriteResult", "FieldDifference", "Namespace"]

TREE = {
    "KvpoolError": "Exception",
    "UsageError": "KvpoolError",
    "InvalidHashError": "UsageError",
    "InvalidBufferError": "UsageError",
    "InvalidNamespaceError": "UsageError",
    "NamespaceMismatchError": "UsageError",
    "ClosedError": "UsageError",
    "ForbiddenError": "UsageError",
    "SettingsError": "UsageError",
    "UnavailableError": "KvpoolError",
    "AuthenticationError": "UnavailableError",
    "DeadlineError": "UnavailableError",
    "OverloadedError": "UnavailableError",
    "StaleGrantError": "UnavailableError",
    "ProtocolError": "KvpoolError",
    "UnknownNamespaceError": "KvpoolError",
    "CapacityError": "KvpoolError",
    "QuotaError": "CapacityError",
}
"""Each error and its parent."""

OBJECTS = [name for name in NAMES if name != "__version__"]


def public_members(cls):
    """Methods and properties of ``cls`` without those of ``object`` or of another library."""
    return {
        name: member
        for name, member in inspect.getmembers(cls)
        if not name.startswith("_")
        and (inspect.isroutine(member) or isinstance(member, property))
        and any(name in vars(base) for base in cls.__mro__ if base.__module__.startswith("kvpool"))
    }


CLASSES = [name for name in OBJECTS if inspect.isclass(getattr(kvpool, name))]
MEMBERS = [f"{name}.{member}" for name in CLASSES for member in public_members(getattr(kvpool, name))]


def resolve(dotted):
    found = kvpool
    for name in dotted.split("."):
        found = inspect.getattr_static(found, name)
    return found.fget if isinstance(found, property) else inspect.unwrap(getattr(found, "__func__", found))


def test_the_public_names_are_these():
    assert sorted(NAMES) == sorted(kvpool.__all__)
    assert list(kvpool.__all__) == sorted(kvpool.__all__)
    assert len(set(kvpool.__all__)) == len(kvpool.__all__)


def test_every_public_name_is_there_to_import():
    namespace = {}
    exec("from kvpool import *", namespace)

    assert set(NAMES) <= namespace.keys()


def test_nothing_else_is_public_but_modules():
    others = {name for name in vars(kvpool) if not name.startswith("_")} - set(NAMES)

    assert all(inspect.ismodule(getattr(kvpool, name)) for name in others)


@pytest.mark.parametrize("name", [*OBJECTS, *MEMBERS])
def test_every_public_name_says_what_it_is(name):
    found = resolve(name)

    assert found.__doc__
    assert found.__doc__.split("\n\n")[0].strip().endswith(".")


@pytest.mark.parametrize("name", [name for name in [*OBJECTS, *MEMBERS] if inspect.isfunction(resolve(name))])
def test_every_public_function_is_typed(name):
    signature = inspect.signature(resolve(name))
    parameters = [p for p in signature.parameters.values() if p.name not in {"self", "cls"}]

    assert signature.return_annotation is not inspect.Signature.empty
    assert [p.name for p in parameters if p.annotation is inspect.Parameter.empty] == []


@pytest.mark.parametrize("name", METHODS)
def test_the_public_methods_are_these(name):
    assert public_members(getattr(kvpool, name)).keys() == METHODS[name]


@pytest.mark.parametrize("name", RECORDS)
def test_results_are_frozen_records(name):
    cls = getattr(kvpool, name)
    frozen = cls.__struct_config__.frozen if issubclass(cls, msgspec.Struct) else cls.__dataclass_params__.frozen

    assert frozen
    assert dataclasses.is_dataclass(cls) or msgspec.structs.fields(cls)


def test_the_errors_are_one_tree():
    assert sorted(TREE) == list(errors.__all__) == sorted(errors.__all__)
    for name, parent in TREE.items():
        assert getattr(errors, name).__bases__[0].__name__ == parent
        assert getattr(kvpool, name) is getattr(errors, name)


def test_the_tree_drawn_at_the_top_of_the_module_is_that_tree():
    drawn, path = {}, ["Exception"]
    for bars, name in re.findall(r"^((?:│   |    )*(?:├── |└── )?)([A-Z]\w+Error)\b", errors.__doc__, re.MULTILINE):
        depth = len(bars) // 4
        path[depth + 1 :] = [name]
        drawn[name] = path[depth]

    assert drawn == TREE


def test_the_callers_mistakes_are_value_errors_and_nothing_else_is():
    mistakes = {name for name in TREE if issubclass(getattr(errors, name), ValueError)}

    assert mistakes == {name for name in TREE if issubclass(getattr(errors, name), errors.UsageError)}


def test_the_version_is_that_of_the_package():
    assert re.match(r"\d+[.+]", kvpool.__version__)


def test_the_package_says_that_it_is_typed():
    assert Path(kvpool.__file__).with_name("py.typed").exists()


NEED_CUPY = {"kvpool.gpu.kernels", "kvpool.gpu.lanes", "kvpool.gpu.memory", "kvpool.gpu.pinning"}
"""Imported when a `GpuCache` is made or a node takes GPU memory; everything else imports without CUDA."""


def test_every_module_says_what_it_decides_or_moves():
    modules = [name for _, name, _ in pkgutil.walk_packages(kvpool.__path__, "kvpool.") if ".v1." not in name]
    if importlib.util.find_spec("cupy") is None:
        modules = [name for name in modules if name not in NEED_CUPY]

    assert len(modules) > 50
    assert [name for name in modules if not importlib.import_module(name).__doc__] == []
