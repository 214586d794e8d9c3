"""The models that vLLM is measured and shown with: a folder with a config.json, and weights where answers matter.

The bench's model has no weights of its own (`load_format` dummy): vLLM makes them up, alike in every engine, and so
small that the answer hardly depends on the prompt. The demo compares answers, so its model gets random weights with
sharp attention, and computes in float32: an answer then depends on every cached block that a head looks at, and two
ways to compute it do not differ by rounding.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

VOCABULARY = 32_000
BLOCK_TOKENS = 32
PROMPT_TOKENS = 8_000

_RESERVED_TOKENS = 3
"""Ids that mean something: padding, begin and end."""

_SHARPNESS = 4.0
"""Spread of the attention scores: high enough that a head looks at a few tokens, not at the mean of all."""


class ModelShape(msgspec.Struct, frozen=True, kw_only=True):
    """A Llama of 4 layers with 4 KV heads of 64: 4,096 KV bytes a token in two-byte types."""

    hidden: int
    intermediate: int
    layers: int = 4
    heads: int = 4
    head_dim: int = 64
    vocabulary: int = VOCABULARY
    positions: int = 16_384
    dtype: str = "bfloat16"

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of keys and values a token has in all layers."""
        return 2 * self.layers * self.heads * self.head_dim * (2 if self.dtype == "bfloat16" else 4)


BENCH_MODEL = ModelShape(hidden=1_024, intermediate=4_864)
"""Computes a prompt of `PROMPT_TOKENS` in about two seconds on two cores."""

DEMO_MODEL = ModelShape(hidden=256, intermediate=688, vocabulary=4_096, dtype="float32")


def config_of(shape: ModelShape) -> dict[str, Any]:
    """The config.json of a Llama of this shape."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocabulary,
        "max_position_embeddings": shape.positions,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": shape.dtype,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def write_model(folder: Path, shape: ModelShape) -> Path:
    """Make ``folder`` with the model's config.json; returns it."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config_of(shape)))
    return folder


def write_weights(folder: Path, shape: ModelShape, seed: int = 1) -> None:
    """Random float32 weights in ``folder``: same shape and seed, same bytes."""
    rng = np.random.default_rng(seed)
    arrays = {name: _random(rng, sizes, scale) for name, sizes, scale in _weights(shape)}
    (folder / "model.safetensors").write_bytes(safetensors(arrays))


def safetensors(arrays: dict[str, NDArray[np.float32]]) -> bytes:
    """The file format of that name: u64 length of a JSON header, the header, then the arrays end to end."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, array in arrays.items():
        header[name] = {"dtype": "F32", "shape": list(array.shape), "data_offsets": [end, end + array.nbytes]}
        end += array.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return b"".join([len(text).to_bytes(8, "little"), text, *(array.tobytes() for array in arrays.values())])


def prompt_of(seed: int, tokens: int = PROMPT_TOKENS, vocabulary: int = VOCABULARY) -> list[int]:
    """A prompt that shares no block with that of another seed."""
    rng = np.random.default_rng(seed)
    ids: list[int] = rng.integers(_RESERVED_TOKENS, vocabulary, tokens).tolist()
    return ids


def _weights(shape: ModelShape) -> Iterator[tuple[str, tuple[int, ...], float]]:
    """Name, shape and spread of every weight; 0 is a norm, which is all ones.

    With a spread of 1/sqrt(inputs) a layer keeps the spread of what it is given.
    """
    hidden, inner = shape.hidden, shape.heads * shape.head_dim
    wide = hidden**-0.5
    yield "model.embed_tokens.weight", (shape.vocabulary, hidden), 1.0
    for i in range(shape.layers):
        layer = f"model.layers.{i}"
        for name in ("q_proj", "k_proj"):
            yield f"{layer}.self_attn.{name}.weight", (inner, hidden), wide * _SHARPNESS**0.5
        yield f"{layer}.self_attn.v_proj.weight", (inner, hidden), wide
        yield f"{layer}.self_attn.o_proj.weight", (hidden, inner), inner**-0.5
        yield f"{layer}.mlp.gate_proj.weight", (shape.intermediate, hidden), wide
        yield f"{layer}.mlp.up_proj.weight", (shape.intermediate, hidden), wide
        yield f"{layer}.mlp.down_proj.weight", (hidden, shape.intermediate), shape.intermediate**-0.5
        yield f"{layer}.input_layernorm.weight", (hidden,), 0.0
        yield f"{layer}.post_attention_layernorm.weight", (hidden,), 0.0
    yield "model.norm.weight", (hidden,), 0.0
    yield "lm_head.weight", (shape.vocabulary, hidden), wide


def _random(rng: np.random.Generator, sizes: tuple[int, ...], scale: float) -> NDArray[np.float32]:
    if not scale:
        return np.ones(sizes, np.float32)
    return rng.standard_normal(sizes, np.float32) * np.float32(scale)
