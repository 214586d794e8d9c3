"""Who shares blocks with whom, and what is refused before an engine starts."""

import subprocess
import sys

import pytest
import torch
from vllm.lora.request import LoRARequest
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

from kvpool import SettingsError
from kvpool_connector.vllm.version import check_version
from tests.vllm.shapes import BLOCK, Shape

HASH_IN_A_PROCESS = """
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils as utils
function = get_hash_fn_by_name("sha256_cbor")
utils.init_none_hash(function)
print(utils.hash_block_tokens(function, None, list(range(16))).hex())
"""


def half_spec(dtype):
    return FullAttentionSpec(block_size=BLOCK, num_kv_heads=2, head_size=16, dtype=dtype)


def shares(engines, prompt, ours, theirs, **fields):
    """Whether an engine of one kind loads what one of the other has saved."""
    engines.start(ours).generate(prompt, **fields)
    engine = engines.start(theirs)
    name = engine.generate(prompt, 2, **fields)
    assert engine.outputs[name] == engine.expected_output(name, 2)
    return bool(engine.load_jobs)


def test_two_processes_have_equal_hashes():
    """V24: without PYTHONHASHSEED set anywhere."""
    other = subprocess.run([sys.executable, "-c", HASH_IN_A_PROCESS], capture_output=True, text=True, check=True)
    function = get_hash_fn_by_name("sha256_cbor")
    kv_cache_utils.init_none_hash(function)
    ours = kv_cache_utils.hash_block_tokens(function, None, list(range(16)))
    assert other.stdout.splitlines()[-1] == ours.hex()
    assert len(ours) == 32


def test_engines_alike_share(engines, tokens):
    assert shares(engines, tokens(3 * BLOCK), Shape(), Shape())


def test_another_algorithm_is_another_namespace(engines, tokens, caplog):
    """V25: no hit, and the difference is said."""
    assert not shares(engines, tokens(3 * BLOCK), Shape(), Shape(algorithm="sha256"))
    assert "hash_algorithm" in caplog.text


def test_another_seed_is_another_namespace(engines, tokens, monkeypatch, caplog):
    """V25: PYTHONHASHSEED in one engine only; the digest of it is shown, not the seed."""
    prompt = tokens(3 * BLOCK)
    engines.start().generate(prompt)
    monkeypatch.setenv("PYTHONHASHSEED", "12345")
    engine = engines.start()
    engine.generate(prompt)
    assert not engine.load_jobs
    assert "hash_seed" in caplog.text
    assert "12345" not in caplog.text


def test_other_key_value_types_share_nothing(engines, tokens):
    """V28: bytes of one type are never read as another, not even of the same size."""
    float16 = Shape(specs={f"layers.{i}": half_spec(torch.float16) for i in range(3)})
    bfloat16 = Shape(specs={f"layers.{i}": half_spec(torch.bfloat16) for i in range(3)})
    assert not shares(engines, tokens(3 * BLOCK), float16, bfloat16)
    fp8 = Shape(cache_dtype="fp8_e5m2", specs={f"layers.{i}": half_spec(torch.uint8) for i in range(3)})
    assert not shares(engines, tokens(3 * BLOCK), bfloat16, fp8)


@pytest.mark.parametrize(("field", "value"), [("tenant", "other"), ("epoch", 1), ("model", "other-model")])
def test_operators_keep_engines_apart(engines, tokens, field, value):
    """Tenant, epoch and name of the model are part of the namespace."""
    prompt = tokens(3 * BLOCK)
    engines.start().generate(prompt)
    engine = engines.start(**{field: value})
    engine.generate(prompt)
    assert not engine.load_jobs


def test_adapters_and_salts_share_nothing(engines, tokens):
    """V26: the hash holds an adapter's name and path, and a salt is no adapter's name."""
    prompt = tokens(3 * BLOCK)
    old = LoRARequest("adapter", 1, "/models/old")
    engines.start().generate(prompt, lora_request=old)
    for fields in ({"lora_request": LoRARequest("adapter", 1, "/models/new")}, {"cache_salt": "adapter"}, {}):
        engine = engines.start()
        engine.generate(prompt, **fields)
        assert not engine.load_jobs
    engine = engines.start()
    engine.generate(prompt, lora_request=old)
    assert len(engine.load_jobs) == 1


def test_a_hybrid_model_runs_without_the_pool(engines, tokens, caplog):
    """V31, V10: several groups: HMA stays on, one warning, no hits, no saves, nothing fails."""
    window = SlidingWindowSpec(
        block_size=BLOCK, num_kv_heads=2, head_size=16, dtype=torch.bfloat16, sliding_window=2 * BLOCK
    )
    specs = {f"layers.{i}": window if i % 2 else half_spec(torch.bfloat16) for i in range(4)}
    engine = engines.build(Shape(specs=specs, blocks=128))
    assert len(engine.kv_config.kv_cache_groups) == 2
    engine.shake_hands()
    for _ in range(2):
        engine.add(tokens(3 * BLOCK), 3)
    engine.run_unchecked()
    assert not engine.load_jobs
    assert not engine.save_jobs
    (message,) = [r.getMessage() for r in caplog.records if "not used" in r.message]
    assert "hybrid" in message


def test_hashes_that_collide_are_refused(engines):
    """xxhash: practical collisions, and another seed in every process."""
    with pytest.raises(SettingsError, match="sha256_cbor"):
        engines.build(Shape(algorithm="xxhash"))


@pytest.mark.parametrize(
    ("extra", "says"),
    [
        ({"pol": "grpc://x:1"}, "pol"),
        ({"pool": "http://x:1"}, "grpc://HOST:PORT"),
        ({"lookup_timeout_s": 0}, "lookup_timeout_s"),
        ({"transports": ["carrier pigeon"]}, "transports"),
        ({"save_pinned_fraction": 2}, "save_pinned_fraction"),
    ],
)
def test_bad_settings_are_refused(engines, extra, says):
    """`kv_connector_extra_config` is checked before anything starts; the message names the key."""
    with pytest.raises(SettingsError, match=says):
        engines.build(**extra)


@pytest.mark.parametrize("version", ["0.31.9", "0.34.0", "1.0.0", "0.19.0", "dev"])
def test_other_versions_are_refused(version):
    with pytest.raises(SettingsError, match=r"0\.32"):
        check_version(version)


def test_these_versions_are_accepted():
    for version in ("0.32.0", "0.33.1", "0.32.0+cpu", "0.33.0rc1"):
        check_version(version)


def test_a_producer_only_saves_and_a_consumer_only_loads(engines, tokens):
    """Roles: what each does not do is not even asked."""
    prompt = tokens(3 * BLOCK + 1)
    producer = engines.start(Shape(role="kv_producer"))
    producer.generate(prompt)
    assert producer.count("save_blocks") == 3
    consumer = engines.start(Shape(role="kv_consumer"))
    name = consumer.generate(prompt, 2 * BLOCK)
    assert consumer.outputs[name] == consumer.expected_output(name, 2 * BLOCK)
    assert consumer.count("load_tokens") == 3 * BLOCK
    assert not consumer.save_jobs
    producer = engines.start(Shape(role="kv_producer"))
    producer.generate(prompt)
    assert not producer.load_jobs
    assert producer.count("lookup_tokens") == 0


def test_what_the_connector_tells_vllm(engines):
    """Contract, section 3: no delivery, host hits, asynchronous loads, no sleep mode."""
    engine = engines.build()
    engine.shake_hands()
    connector = engine.connector
    assert not connector.requires_kv_delivery
    assert not connector.supports_sleep_mode(engine.config.kv_transfer_config)
    assert sum(connector.get_external_cache_hit_sources(None, 32).values()) == 32
