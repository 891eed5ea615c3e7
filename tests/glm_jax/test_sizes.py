"""Counts, cache and work against the published size sheet, which was derived independently."""

import jax
import pytest

from glm_jax.cache import LatentCache
from glm_jax.errors import GlmError
from glm_jax.presets import PRESETS, preset
from glm_jax.sizes import Sizes, cache_bytes, cache_layout, fp8_cache_layout

COMMON_PARTS = {
    # name: (per unit, units, total)
    "embedding, lm_head": (951_582_720, 2, 1_903_165_440),
    "MLA": (165_022_208, 78, 12_871_732_224),
    "layer norms": (12_288, 78, 958_464),
    "dense MLP": (226_492_416, 3, 679_477_248),
    "MoE": (9_702_998_016, 75, 727_724_851_200),
    "final norm": (6_144, 1, 6_144),
    "MTP layer": (9_952_920_320, 1, 9_952_920_320),
}
ALL_FULL = COMMON_PARTS | {"indexer": (9_371_904, 78, 731_008_512)}
SHARING = COMMON_PARTS | {"indexer": (9_371_904, 21, 196_809_984)}
EXPECTED = {
    # name: (parts, main model, all stored, active, cache bytes a token, the same in FP8)
    "glm-5": (ALL_FULL, 743_911_199_232, 753_864_119_552, 40_833_126_912, 109_824, 61_464),
    "glm-5.1": (ALL_FULL, 743_911_199_232, 753_864_119_552, 40_833_126_912, 109_824, 61_464),
    "glm-5.2": (SHARING, 743_377_000_704, 753_329_921_024, 40_298_928_384, 95_232, 53_940),
}


@pytest.fixture(scope="module")
def sizes():
    """Sizes of every preset; each tree is built once."""
    return {name: Sizes.of(preset(name)) for name in PRESETS}


@pytest.mark.parametrize("name", EXPECTED)
def test_every_part_has_the_published_count(sizes, name):
    found = {x.name: (x.per_unit, x.units, x.total) for x in sizes[name].parts}
    assert found == EXPECTED[name][0]


@pytest.mark.parametrize("name", EXPECTED)
def test_totals_are_the_published_ones(sizes, name):
    found = sizes[name]
    _, main, stored, active, _, _ = EXPECTED[name]
    assert (found.main, found.stored, found.active) == (main, stored, active)
    assert found.mtp == stored - main
    assert found.buffers == 76 * 256


def test_glm_5_2_uses_40_30_billion_parameters_a_token(sizes):
    assert f"{sizes['glm-5.2'].active / 1e9:.2f}" == "40.30"


def test_small_has_10_317_376_parameters_and_no_mtp_layer(sizes):
    found = sizes["small"]
    assert (found.stored, found.main, found.mtp, found.buffers) == (10_317_376, 10_317_376, 0, 80)
    assert [x.units for x in found.parts if x.name == "MTP layer"] == [0]


@pytest.mark.parametrize("name", PRESETS)
def test_parts_and_buffers_cover_the_tree_once(sizes, name):
    found = sizes[name]
    in_tree = sum(x.n_elements for x in found.tensors)
    assert sum(x.total for x in found.parts) + found.buffers == in_tree
    assert all(x.per_unit * x.units == x.total for x in found.parts)
    assert sum(found.bytes_by_dtype.values()) == sum(x.n_bytes for x in found.tensors)


def test_f32_bytes_are_routers_and_their_biases(sizes):
    found = sizes["glm-5.2"].bytes_by_dtype
    in_f32 = 76 * (6144 * 256 + 256)
    assert found == {"float32": 4 * in_f32, "bfloat16": 2 * (753_329_921_024 - 76 * 6144 * 256)}


def test_no_array_is_made():
    held = jax.live_arrays()  # keeps other tests' arrays alive, so that the count cannot fall
    Sizes.of(preset("glm-5.2"))
    assert len(jax.live_arrays()) == len(held)


@pytest.mark.parametrize("name", EXPECTED)
def test_cache_bytes_are_the_published_ones(name):
    cfg = preset(name)
    assert cache_bytes(cfg, cache_layout(cfg)) == EXPECTED[name][4]
    assert cache_bytes(cfg, fp8_cache_layout(cfg)) == EXPECTED[name][5]
    assert fp8_cache_layout(cfg) == (656, 132)


@pytest.mark.parametrize("name", ["glm-5", "glm-5.2", "small", "tiny"])
def test_cache_bytes_are_those_of_the_cache(name):
    cfg = preset(name)
    cache = jax.eval_shape(lambda: LatentCache.empty(cfg, 1, 1))
    pages = (cache.latent_LPsC, cache.index_MPsJ)
    stored = sum(x.size * x.dtype.itemsize for x in pages)
    layout = cache_layout(cfg)
    a_token = cache_bytes(cfg, layout) + cfg.num_nextn_predict_layers * sum(layout)
    assert stored == cache.page_size * a_token  # one token takes one page


@pytest.mark.parametrize("name", ["glm-5", "glm-5.2"])
@pytest.mark.parametrize("context", [2048, 2049, 131_072])
def test_decode_work_past_the_top_k_is_that_of_the_size_sheet(sizes, name, context):
    full = {"glm-5": 78, "glm-5.2": 21}[name]
    work = sizes[name].work(context - 1, 1)
    assert work.attention == 78 * 285_212_672  # 2 x 2048 x 64 x (576 + 512)
    assert work.absorption == 78 * 29_360_128
    assert work.indexer == full * 8_192 * context


def test_attention_grows_with_the_context_up_to_the_top_k(sizes):
    per_key = 78 * 2 * 64 * (576 + 512)
    assert sizes["glm-5.2"].work(999, 1).attention == 1000 * per_key


def test_weight_work_is_two_flops_per_active_matrix_element(sizes):
    found = sizes["glm-5.2"]
    norms = 78 * (2 * 6144 + 2048 + 512) + 6144 + 21 * 2 * 128
    work = found.work(0, 1)
    assert work.projections + work.absorption == 2 * (found.active - norms)


@pytest.mark.parametrize("split", [1, 11, 12, 13, 40])
def test_work_of_a_prompt_is_the_sum_over_its_tokens(sizes, split):
    found = sizes["tiny"]  # top 12 keys, so that the sum crosses the bend
    steps = [found.work(t, 1) for t in range(41)]
    chunks = [found.work(0, split), found.work(split, 41 - split)]
    whole = found.work(0, 41)
    for key in ("projections", "absorption", "attention", "indexer", "forward", "training"):
        assert getattr(whole, key) == sum(getattr(x, key) for x in steps)
        assert getattr(whole, key) == sum(getattr(x, key) for x in chunks)
    assert whole.training == 3 * whole.forward


@pytest.mark.parametrize(
    "n_cached, n_tokens, shown", [(-1, 1, "0"), (160, 2**20, "1048736"), (5, 0, "5"), (-3, 9, "6")]
)
def test_impossible_contexts_are_errors_that_name_the_limit(sizes, n_cached, n_tokens, shown):
    with pytest.raises(GlmError, match=f"context = {shown}: .*max_position_embeddings = 1048576"):
        sizes["tiny"].work(n_cached, n_tokens)
