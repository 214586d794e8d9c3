"""V35: pages of every physical layout, byte for byte."""

import numpy as np
import pytest
import torch
from vllm.v1.kv_cache_interface import MLAAttentionSpec
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import allocate_kv_cache

from kvpool_connector.vllm.pages import UnsupportedLayoutError, open_pages
from tests.vllm.shapes import BLOCK, Shape, make_config, make_kv_configs

LAYOUTS = [layout.name for layout in KVCacheLayout]
ONE_RUN = ["LBHNC", "LBNHC", "BLHNC", "BLNHC", "BHLNC"]
"""Layouts whose blocks are runs of bytes, alone or together with the other layers'."""


def caches_of(model, layout, **fields):
    shape = Shape(layout=layout, **fields)
    (kv,), _ = make_kv_configs(make_config(model, shape), shape)
    return allocate_kv_cache(kv, torch.device("cpu"), KVCacheLayout[layout])


def fill(caches, generator):
    """Different bytes everywhere; returns each layer's as (blocks, heads, tokens, content bytes)."""
    views = [cache.view(torch.uint8).numpy() for cache in caches.values()]
    for view in views:
        view[...] = generator.integers(0, 256, view.shape, np.uint8)
    return views


def test_every_layout_is_one_of_the_two_kinds():
    assert set(ONE_RUN) | {"LHBNC"} == set(LAYOUTS)


@pytest.mark.parametrize("layout", ONE_RUN)
@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize("layers", [1, 2, 5])
def test_a_round_trip_keeps_every_byte(tiny_model, layout, heads, layers):
    """What is gathered from some blocks is scattered to others of a second cache; nothing else is touched."""
    generator = np.random.default_rng(3)
    source = caches_of(tiny_model, layout, heads=heads, layers=layers)
    target = caches_of(tiny_model, layout, heads=heads, layers=layers)
    ours, theirs = fill(source, generator), fill(target, generator)
    before = [view.copy() for view in theirs]
    pages = open_pages(source)
    read, written = [5, 1, 60, 17], [2, 63, 1, 9]
    out = np.empty((4, pages.runs.block_bytes), np.uint8)
    pages.gather(read, out)
    open_pages(target).scatter(written, out)
    for view, expected, old in zip(theirs, ours, before, strict=True):
        old[written] = expected[read]
        assert np.array_equal(view, old)
    assert pages.runs.block_bytes == sum(view[0].nbytes for view in ours)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_bytes_of_a_block_are_never_mixed(tiny_model, layout):
    """A layout that cannot be moved is refused, not moved wrongly."""
    caches = caches_of(tiny_model, layout)
    if layout in ONE_RUN:
        open_pages(caches)
    else:
        with pytest.raises(UnsupportedLayoutError):
            open_pages(caches)


def test_a_layer_by_head_layout_of_one_head_is_one_run(tiny_model):
    """LHBNC with a single head is LBHNC: its pages are runs."""
    caches = caches_of(tiny_model, "LHBNC", heads=1)
    views = fill(caches, np.random.default_rng(1))
    pages = open_pages(caches)
    out = np.empty((1, pages.runs.block_bytes), np.uint8)
    pages.gather([7], out)
    assert np.array_equal(out[0], np.concatenate([view[7].ravel() for view in views]))


@pytest.mark.parametrize("layout", ["LBHNC", "BLHNC"])
def test_layers_of_one_page_each_for_latent_attention(tiny_model, layout):
    """MLA: one latent head, whose page is opaque."""
    spec = MLAAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=96, dtype=torch.bfloat16)
    caches = caches_of(tiny_model, layout, specs={f"layers.{i}": spec for i in range(3)})
    views = fill(caches, np.random.default_rng(2))
    pages = open_pages(caches)
    out = np.empty((2, pages.runs.block_bytes), np.uint8)
    pages.gather([4, 8], out)
    for row, block in enumerate([4, 8]):
        assert np.array_equal(out[row], np.concatenate([view[block].ravel() for view in views]))


def test_layers_of_different_shapes_are_refused(tiny_model):
    """A model with two kinds of layers has no common page: refused with a reason."""
    caches = caches_of(tiny_model, "LBHNC")
    first, *_ = caches
    caches[first] = caches[first][:, :1]
    with pytest.raises(UnsupportedLayoutError, match="shape"):
        open_pages(caches)


def test_layers_in_several_allocations_are_refused(tiny_model):
    caches = caches_of(tiny_model, "LBHNC")
    first, *_ = caches
    caches[first] = torch.zeros_like(caches[first])
    with pytest.raises(UnsupportedLayoutError, match="allocation"):
        open_pages(caches)


def test_state_layers_are_refused(tiny_model):
    caches = caches_of(tiny_model, "LBHNC")
    with pytest.raises(UnsupportedLayoutError, match="state"):
        open_pages({**caches, "mamba": [torch.zeros(4)]})
    with pytest.raises(UnsupportedLayoutError):
        open_pages({})


@pytest.mark.parametrize("layout", ONE_RUN)
def test_engines_share_blocks_in_every_layout(engines, tokens, layout):
    """The whole way: computed by one engine, loaded by another, attended over."""
    prompt = tokens(4 * BLOCK + 2)
    first = engines.start(Shape(layout=layout))
    first.generate(prompt)
    second = engines.start(Shape(layout=layout))
    name = second.generate(prompt, 2)
    assert second.count("load_tokens") == 4 * BLOCK
    assert second.outputs[name] == second.expected_output(name, 2)


def test_engines_of_different_layouts_share_nothing(engines, tokens):
    """Their bytes lie in another order: different namespaces, no hit."""
    prompt = tokens(4 * BLOCK + 2)
    engines.start(Shape(layout="LBHNC")).generate(prompt)
    for layout in ("LBNHC", "BLHNC", "BHLNC"):
        other = engines.start(Shape(layout=layout))
        other.generate(prompt)
        assert not other.load_jobs


def test_an_engine_whose_layout_cannot_be_moved_runs_without_the_pool(engines, tokens, caplog):
    """LHBNC with several heads: one warning, no hits, no saves."""
    engine = engines.build(Shape(layout="LHBNC"))
    engine.shake_hands()
    name = engine.generate(tokens(4 * BLOCK), 2)
    assert engine.outputs[name] == engine.expected_output(name, 2)
    assert not engine.save_jobs
    assert sum("not used by this engine" in record.message for record in caplog.records) == 1
