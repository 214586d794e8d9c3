"""What a scheduler-level test's engine is like, and the configurations that vLLM's own functions make of it."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from vllm.config import (
    CacheConfig,
    KVTransferConfig,
    LoadConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.kv_cache_utils import (
    generate_scheduler_kv_cache_config,
    resolve_cache_hit_alignment_tokens,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheSpec

try:
    from vllm.v1.core import kv_cache_planning
except ImportError:  # 0.32
    kv_cache_planning = None

BLOCK = 16
POOL_CONNECTOR = {"kv_connector": "KVPoolConnector", "kv_connector_module_path": "kvpool_connector.vllm.connector"}


@dataclass
class Shape:
    """What an engine is like; all that tests vary."""

    blocks: int = 64
    layers: int = 3
    heads: int = 2
    head_size: int = 16
    layout: str = "LBHNC"
    dtype: torch.dtype = torch.bfloat16
    tensor_ranks: int = 1
    specs: dict[str, KVCacheSpec] | None = None
    asynchronous: bool = False
    batched_tokens: int = 256
    sequences: int = 16
    role: str = "kv_both"
    policy: str = "recompute"
    algorithm: str = "sha256_cbor"
    cache_dtype: str = "auto"
    weights: int = 0
    transfer: dict[str, Any] | None = None
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def model_tokens(self) -> int:
        """The longest request: it fits without the null block."""
        return min(self.blocks - 1, 62) * BLOCK

    def layer_specs(self) -> dict[str, KVCacheSpec]:
        spec = FullAttentionSpec(
            block_size=BLOCK,
            num_kv_heads=self.heads,
            head_size=self.head_size,
            dtype=self.dtype,
        )
        return self.specs or {f"model.layers.{i}.self_attn.attn": spec for i in range(self.layers)}


def make_config(model: Path, shape: Shape) -> VllmConfig:
    """A configuration as an engine's start makes it."""
    transfer = shape.transfer or {**POOL_CONNECTOR, "kv_connector_extra_config": shape.extra}
    config = VllmConfig(
        model_config=ModelConfig(
            model=str(model),
            skip_tokenizer_init=True,
            dtype="bfloat16",
            seed=0,
            max_model_len=shape.model_tokens,
            enforce_eager=True,
        ),
        scheduler_config=SchedulerConfig(
            max_num_seqs=shape.sequences,
            max_num_batched_tokens=shape.batched_tokens,
            max_model_len=shape.model_tokens,
            is_encoder_decoder=False,
            async_scheduling=shape.asynchronous,
            watermark=0.0,
        ),
        cache_config=CacheConfig(
            block_size=BLOCK,
            enable_prefix_caching=True,
            prefix_caching_hash_algo=shape.algorithm,
            cache_dtype=shape.cache_dtype,
            num_gpu_blocks_override=shape.blocks,
        ),
        load_config=LoadConfig(load_format="dummy"),
        parallel_config=ParallelConfig(
            tensor_parallel_size=shape.tensor_ranks,
            distributed_executor_backend="mp" if shape.tensor_ranks > 1 else None,
        ),
        kv_transfer_config=KVTransferConfig(
            kv_role=shape.role, kv_load_failure_policy=shape.policy, engine_id="engine", **transfer
        ),
    )
    config.cache_config.kv_cache_layout = shape.layout
    return config


def make_kv_configs(config: VllmConfig, shape: Shape) -> tuple[list[KVCacheConfig], KVCacheConfig]:
    """The workers' KV cache configurations, and the scheduler's, by vLLM's own functions."""
    ranks = shape.tensor_ranks
    specs, memory = [shape.layer_specs()] * ranks, [1 << 30] * ranks
    if kv_cache_planning is None:
        worker_configs = kv_cache_utils.get_kv_cache_configs(config, specs, memory)
    else:
        groups = kv_cache_planning.get_global_kv_cache_groups(config, specs)
        worker_configs = kv_cache_planning.get_kv_cache_configs(config, specs, memory, groups)
    for kv in worker_configs:
        kv.kv_cache_layout = shape.layout
    scheduler_config = generate_scheduler_kv_cache_config(worker_configs)
    config.cache_config.num_gpu_blocks = scheduler_config.num_blocks
    size, hash_size = resolve_kv_cache_block_sizes(scheduler_config, config)
    alignment = resolve_cache_hit_alignment_tokens(scheduler_config, config, size, hash_size)
    for kv in (*worker_configs, scheduler_config):
        kv.hash_block_size, kv.cache_hit_alignment_tokens = hash_size, alignment
    return worker_configs, scheduler_config
