"""The codec: the same bits for any dtype and values; damage is refused; sizes near the floor."""

import zlib

import ml_dtypes
import numpy as np
import pytest
import zstandard

from glm_jax.checkpoint.delta import codec, packing
from glm_jax.checkpoint.delta.changes import BLOCK
from glm_jax.checkpoint.delta.codec import MAGIC, apply, encode
from glm_jax.checkpoint.delta.packing import Reader, Writer
from glm_jax.errors import GlmError
from tests.glm_jax.checkpoint.delta.arrays import DTYPES, any_bits, assert_bits, bits, updated

LEVELS = ("small", "fast")
pytestmark = pytest.mark.parametrize("level", LEVELS)


def name(dtype: np.dtype) -> str:
    return dtype.name


@pytest.mark.parametrize("share", [0.0, 0.001, 0.3, 1.0])
@pytest.mark.parametrize("dtype", DTYPES, ids=name)
def test_arbitrary_bits_of_any_dtype_come_back(rng, dtype, share, level):
    old, new = any_bits(rng, dtype, 5000), any_bits(rng, dtype, 5000)
    new = np.where(rng.random(5000) < share, new, old)
    before = old.tobytes()
    assert_bits(apply(old, encode(old, new, level=level)), new)
    assert old.tobytes() == before


@pytest.mark.parametrize("lr", [1e-7, 1e-6, 1e-5, 1e-4, 1e-2])
@pytest.mark.parametrize(
    "dtype", [ml_dtypes.bfloat16, np.float16, np.float32, ml_dtypes.float8_e4m3fn]
)
def test_small_and_large_updates_come_back(rng, dtype, lr, level):
    old, new = updated(rng, (37, 1111), lr, dtype)
    assert_bits(apply(old, encode(old, new, level=level)), new)


@pytest.mark.parametrize(
    "shape", [(), (0,), (3, 0, 2), (1,), (1, 1), (BLOCK,), (BLOCK + 1,), (5, 7)]
)
def test_any_shape_comes_back(rng, shape, level):
    old, new = updated(rng, shape, 1e-3)
    assert_bits(apply(old, encode(old, new, level=level)), new)
    assert_bits(apply(old, encode(old, old, level=level)), old)


def test_zeros_of_both_signs_and_nan_payloads_are_kept(level):
    old = np.array([0x0000, 0x8000, 0x7FC0, 0x7FC1, 0xFFFF, 0x7F80], np.uint16)
    new = np.array([0x8000, 0x0000, 0x7FC1, 0x7FC0, 0x7F81, 0xFF80], np.uint16)
    old, new = (np.tile(x, 100).view(ml_dtypes.bfloat16) for x in (old, new))
    assert_bits(apply(old, encode(old, new, level=level)), new)


def test_arrays_that_are_not_contiguous_come_back(rng, level):
    old, new = updated(rng, (64, 96), 1e-4)
    assert_bits(apply(old.T, encode(old.T, new.T, level=level)), new.T)
    assert_bits(apply(old[::2], encode(old[::2], new[::2], level=level)), new[::2])


def test_segments_join_without_seams(rng, level, monkeypatch):
    monkeypatch.setattr(codec, "MOST_ELEMENTS", 3000)
    old, new = updated(rng, (10_000,), 1e-5)
    assert_bits(apply(old, encode(old, new, level=level)), new)


def test_changes_far_apart_and_in_long_runs_come_back(rng, level):
    old = updated(rng, (200 * BLOCK,))[0]
    new = old.copy()
    words = new.view(np.uint16)
    words[[0, 1, 150 * BLOCK, 200 * BLOCK - 1]] += 1
    words[7 * BLOCK : 9 * BLOCK] -= 3
    assert_bits(apply(old, encode(old, new, level=level)), new)


def test_the_result_goes_where_it_is_asked_for(rng, level):
    old, new = updated(rng, (100, 100))
    out = np.empty_like(old)
    assert apply(old, encode(old, new, level=level), out=out) is out
    assert_bits(out, new)
    with pytest.raises(GlmError, match=r"out is bfloat16 \(100, 50\); need .* \(100, 100\)"):
        apply(old, encode(old, new, level=level), out=out[:, ::2])


def test_another_base_gives_other_bits(rng, level):
    """The control: equality is not given."""
    old, new = updated(rng, (100, 1000))
    other = old.copy()
    bits(other)[::777] ^= 1
    assert apply(other, encode(old, new, level=level)).tobytes() != new.tobytes()


def test_a_flipped_bit_anywhere_is_refused(rng, level):
    old, new = updated(rng, (3000,), 1e-5)
    delta = encode(old, new, level=level)
    for at in range(len(delta)):
        damaged = bytearray(delta)
        damaged[at] ^= 1 << (at % 8)
        with pytest.raises(GlmError):
            apply(old, bytes(damaged))


def test_a_cut_or_lengthened_delta_is_refused(rng, level):
    old, new = updated(rng, (3000,), 1e-5)
    delta = encode(old, new, level=level)
    for n in range(len(delta)):
        with pytest.raises(GlmError):
            apply(old, delta[:n])
    with pytest.raises(GlmError, match="1 bytes follow its end"):
        apply(old, delta + b"\0")


def test_a_forged_segment_is_refused_or_harmless(rng, level):
    """Checksums can be forged; then the streams are checked, and no memory is written beyond."""
    old, new = updated(rng, (20_000,), 3e-5)
    delta = encode(old, new, level=level)
    reader = Reader(delta[len(MAGIC) :])
    head, body = bytes(reader.block()), bytes(reader.block())[4:]
    n_refused = 0
    for at in rng.integers(0, len(body), 400):
        forged = bytearray(body)
        forged[at] ^= 1 << rng.integers(8)
        out = Writer()
        out.block(head)
        out.block(zlib.crc32(forged).to_bytes(4, "little") + forged)
        try:
            found = apply(old, MAGIC + out.result())
            assert found.shape == old.shape
        except GlmError:
            n_refused += 1
    assert n_refused > 20


def test_a_frame_that_declares_or_holds_too_much_is_refused_before_it_is_unpacked(level):
    bomb = zstandard.compress(bytes(2**28))
    with pytest.raises(GlmError, match="declares a size other than 100"):
        packing.decompress(bomb, 100)
    silent = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(2**20))
    with pytest.raises(GlmError, match="damaged"):
        packing.decompress(silent, 100)
    options = zstandard.ZstdCompressionParameters(window_log=27, write_content_size=False)
    wide = zstandard.ZstdCompressor(compression_params=options).compressobj()
    frame = wide.compress(bytes(100)) + wide.flush()
    with pytest.raises(GlmError, match="too much memory"):
        packing.decompress(frame, 100)


def test_a_delta_for_another_array_is_named(rng, level):
    old, new = updated(rng, (4, 8))
    delta = encode(old, new, level=level)
    with pytest.raises(GlmError, match=r"is for bfloat16 \(4, 8\), the old array is .* \(8, 4\)"):
        apply(old.reshape(8, 4), delta)
    with pytest.raises(GlmError, match=r"the old array is float16 \(4, 8\)"):
        apply(old.view(np.float16), delta)
    with pytest.raises(GlmError, match="does not begin like one"):
        apply(old, b"PK" + delta)
    with pytest.raises(GlmError, match=r"new is bfloat16 \(8, 4\), old is bfloat16 \(4, 8\)"):
        encode(old, new.reshape(8, 4), level=level)


def test_an_unknown_version_level_or_dtype_is_named(rng, level, monkeypatch):
    old, new = updated(rng, (4, 8))
    monkeypatch.setattr(codec, "VERSION", 9)
    delta = encode(old, new, level=level)
    monkeypatch.undo()
    with pytest.raises(GlmError, match="format version 9, this program reads 1"):
        apply(old, delta)
    with pytest.raises(GlmError, match="level 'tiny': no such level; use 'small' or 'fast'"):
        encode(old, new, level="tiny")
    objects = np.array([object()])
    with pytest.raises(GlmError, match="holds Python objects"):
        encode(objects, objects, level=level)


def test_bytes_do_not_depend_on_memory_layout_or_history(rng, level):
    old, new = updated(rng, (100, 300), 1e-5)
    first = encode(old, new, level=level)
    encode(new, old, level=level)
    assert encode(np.asfortranarray(old), np.asfortranarray(new), level=level) == first


def test_an_unchanged_array_takes_a_few_bytes(rng, level):
    old, _ = updated(rng, (1000, 1000))
    assert len(encode(old, old.copy(), level=level)) < 64
    assert old.size <= codec.MOST_ELEMENTS
