"""Which namespace an engine's blocks belong to: everything that decides whether bytes are interchangeable.

Each worker describes what it holds (`rank_fingerprint`); the scheduler's half makes one namespace of all ranks'
descriptions (`agree`), or says which field differs. Two engines share blocks exactly when their namespaces are equal.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from kvpool import Namespace, SettingsError
from kvpool.gpu import PageRuns
from kvpool_connector.vllm.config import ConnectorConfig

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

FORMAT_VERSION = 1
"""Raised when the bytes of a stored block change their meaning."""

HASH_ALGORITHMS = ("sha256", "sha256_cbor")
SAMPLE_BYTES = 1 << 16
SAMPLES = 16
"""Pieces of each weight file that a local folder's digest covers, with every file's name and length."""

_VOLATILE_CONFIG = frozenset({"_name_or_path", "transformers_version", "_commit_hash", "torch_dtype", "dtype"})


class RankFingerprint(msgspec.Struct, frozen=True):
    """What one rank says of the blocks it holds.

    Attributes:
        block_bytes: Bytes of one block on this rank.
        block_tokens: Tokens a block covers.
        replicas: Consecutive ranks that hold the same bytes.
        layout: Its layers' specs and memory layout; other pipeline stages have other layers.
        fields: All that must be equal on every rank.
    """

    block_bytes: int
    block_tokens: int
    replicas: int
    layout: str
    fields: dict[str, str]


class DisagreementError(Exception):
    """Ranks whose blocks cannot be shards of the same blocks."""


def check_hashing(vllm_config: "VllmConfig") -> None:
    """Refuse block hashes that other engines cannot reproduce, or that an attacker can make collide.

    Raises:
        SettingsError: With the flag to give vLLM.
    """
    cache = vllm_config.cache_config
    algorithm = str(cache.prefix_caching_hash_algo)
    if algorithm not in HASH_ALGORITHMS:
        raise SettingsError(
            f"prefix_caching_hash_algo is {algorithm!r}, whose collisions are practical and whose seed differs in "
            "every process; start vLLM with --prefix-caching-hash-algo sha256_cbor"
        )
    if not cache.enable_prefix_caching:
        raise SettingsError("prefix caching is off, so blocks have no hashes; start vLLM with --enable-prefix-caching")


def rank_fingerprint(
    vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig", runs: PageRuns, device: torch.device
) -> RankFingerprint:
    """The calling worker's description of its blocks."""
    import vllm  # noqa: PLC0415 - only here, in a process that has it
    from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes  # noqa: PLC0415

    block_tokens, _ = resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)
    specs = [spec for group in kv_cache_config.kv_cache_groups for spec in _layer_specs(group)]
    memory = f"{kv_cache_config.kv_cache_layout} runs={len(runs.offsets)}x{runs.size_bytes}"
    return RankFingerprint(
        block_bytes=runs.block_bytes,
        block_tokens=block_tokens,
        replicas=kv_cache_config.kv_tp_replicas,
        layout=f"{memory} {_abridged(specs)}",
        fields=_model_fields(vllm_config)
        | _hash_fields(vllm_config)
        | {"engine": "vllm " + ".".join(vllm.__version__.split(".")[:2]), "attention": _attention(vllm_config, device)},
    )


def agree(ranks: Mapping[tuple[int, int], RankFingerprint], config: ConnectorConfig) -> Namespace:
    """The namespace of an engine's ranks, by (pipeline rank, tensor rank).

    Raises:
        DisagreementError: Names the field that differs, and the ranks.
    """
    ordered = sorted(ranks.items())
    reference_rank, reference = ordered[0]
    for rank, found in ordered:
        for field, left, right in _differences(reference, found, same_stage=rank[0] == reference_rank[0]):
            raise DisagreementError(f"ranks {reference_rank} and {rank} differ in {field}: {left!r} != {right!r}")
    stages = [next(f.layout for (stage, _), f in ordered if stage == s) for s in sorted({s for s, _ in ranks})]
    tensor_ranks = len(ordered) // len(stages)
    if tensor_ranks % reference.replicas:
        raise DisagreementError(f"{tensor_ranks} tensor ranks in groups of {reference.replicas} equal ones")
    fields = dict(reference.fields)
    return Namespace(
        model=config.model or fields.pop("model"),
        revision=fields.pop("revision"),
        block_tokens=reference.block_tokens,
        block_bytes=reference.block_bytes,
        shards=len(stages) * tensor_ranks // reference.replicas,
        quantization=fields.pop("quantization"),
        kv_dtype=fields.pop("kv_dtype"),
        layout=" | ".join(stages),
        hash_algorithm=fields.pop("hash_algorithm"),
        hash_seed=fields.pop("hash_seed"),
        parallel=f"tp{tensor_ranks} pp{len(stages)}",
        format_version=FORMAT_VERSION,
        tenant=config.tenant,
        epoch=config.epoch,
        extra={key: value for key, value in fields.items() if key != "model"},
    )


def shard_of(rank: tuple[int, int], tensor_ranks: int, replicas: int) -> tuple[int, bool]:
    """The shard that a (pipeline, tensor) rank reads, and whether it is the one of its replicas that writes it."""
    stage, tensor_rank = rank
    return stage * (tensor_ranks // replicas) + tensor_rank // replicas, tensor_rank % replicas == 0


def explain(ours: Namespace, documents: Iterable[str]) -> list[str]:
    """For each other namespace of the same model, in which fields it differs; a hit rate of 0 explained."""
    found = []
    for document in documents:
        other = msgspec.json.decode(document, type=Namespace)
        if other.model == ours.model and other != ours and other.tenant == ours.tenant:
            found.append("; ".join(str(difference) for difference in ours.difference(other)))
    return found


def _differences(left: RankFingerprint, right: RankFingerprint, *, same_stage: bool) -> Iterable[tuple[str, Any, Any]]:
    for field in ("block_bytes", "block_tokens", "replicas", *(("layout",) if same_stage else ())):
        if getattr(left, field) != getattr(right, field):
            yield field, getattr(left, field), getattr(right, field)
    for field in sorted({*left.fields, *right.fields}):
        if left.fields.get(field) != right.fields.get(field):
            yield field, left.fields.get(field), right.fields.get(field)


def _layer_specs(group: Any) -> list[str]:  # noqa: ANN401 - vLLM's KVCacheGroupSpec
    """One line a layer: a uniform group keeps a spec for each of its layers."""
    spec = group.kv_cache_spec
    each = getattr(spec, "kv_cache_specs", None)
    return [repr(each[name] if each else spec) for name in group.layer_names]


def _abridged(specs: list[str]) -> str:
    runs = [(spec, len(list(same))) for spec, same in groupby(specs)]
    if len(runs) > 8:
        digest = hashlib.sha256("\n".join(specs).encode()).hexdigest()
        return f"{len(specs)} layers sha256:{digest}"
    return ", ".join(f"{count}x{spec}" for spec, count in runs)


def _hash_fields(vllm_config: "VllmConfig") -> dict[str, str]:
    from vllm.utils.hashing import get_hash_fn_by_name  # noqa: PLC0415
    from vllm.v1.core.kv_cache_utils import resolve_none_hash_seed  # noqa: PLC0415

    algorithm = str(vllm_config.cache_config.prefix_caching_hash_algo)
    seed = resolve_none_hash_seed(get_hash_fn_by_name(algorithm))
    # A digest: the seed may be somebody's secret, and this is shown by `kvpool status`.
    return {"hash_algorithm": algorithm, "hash_seed": hashlib.sha256(seed.encode()).hexdigest()[:16]}


def _model_fields(vllm_config: "VllmConfig") -> dict[str, str]:
    model = vllm_config.model_config
    name, revision = _model_identity(str(model.model), model, str(vllm_config.load_config.load_format))
    speculative = vllm_config.speculative_config
    fields = {
        "model": name,
        "revision": revision,
        "quantization": str(model.quantization or ""),
        "kv_dtype": str(vllm_config.cache_config.cache_dtype),
        "dtype": str(model.dtype),
        "config": _config_digest(model.hf_config),
    }
    if speculative is not None:
        fields["drafter"] = f"{speculative.method} {speculative.model} {speculative.num_speculative_tokens}"
    if getattr(model, "mm_processor_kwargs", None):
        fields["mm_processor"] = json.dumps(model.mm_processor_kwargs, sort_keys=True, default=str)[:512]
    return fields


def _model_identity(path: str, model: Any, load_format: str) -> tuple[str, str]:  # noqa: ANN401 - vLLM's ModelConfig
    """The model's name, and its revision: a commit of its hub, or a digest of a local folder's files."""
    folder = Path(path)
    name = folder.name if folder.is_dir() else path
    if load_format == "dummy":
        return name, f"dummy seed={model.seed}"
    if folder.is_dir():
        return name, "files " + folder_digest(folder)
    commit = getattr(model.hf_config, "_commit_hash", None)
    return name, str(commit or model.revision or "")


def folder_digest(folder: Path) -> str:
    """Digest of a model folder: names and lengths of its weight files, and pieces spread over each.

    Reading all weights would take minutes; fine-tuned weights differ nearly everywhere, so that pieces tell them apart.
    """
    digest = hashlib.sha256()
    for path in sorted(p for p in folder.iterdir() if p.suffix in (".safetensors", ".bin", ".pt", ".gguf")):
        size_bytes = path.stat().st_size
        digest.update(f"{path.name} {size_bytes}\n".encode())
        with path.open("rb") as file:
            for i in range(SAMPLES):
                file.seek((size_bytes - SAMPLE_BYTES) * i // (SAMPLES - 1) if size_bytes > SAMPLE_BYTES else 0)
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()[:32]


def _config_digest(config: Any) -> str:  # noqa: ANN401 - transformers' PretrainedConfig
    """Digest of the model's configuration, rope scaling and overrides included."""
    content = {key: value for key, value in config.to_dict().items() if key not in _VOLATILE_CONFIG}
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _attention(vllm_config: "VllmConfig", device: torch.device) -> str:
    """Device, and what packs keys and values there: the CPU back end orders them for the instructions it uses."""
    if device.type != "cpu":
        return str(device.type)
    amx = torch.cpu._is_amx_tile_supported() and vllm_config.model_config.dtype == torch.bfloat16
    return f"cpu {'amx' if amx else torch.backends.cpu.get_cpu_capability().lower()}"
