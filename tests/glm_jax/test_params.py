"""Parameters: one declaration, no memory, values that depend on seed and name alone."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

from glm_jax.model import GlmModel
from glm_jax.params import ONES, ZEROS, Buffer, Constant, Normal, declare, leaves, materialise
from glm_jax.presets import PRESETS, preset

INIT = Normal(0.5)


class Pair(nnx.Module):
    """Two parameters; `also` adds some before, between and after them."""

    def __init__(self, *, dtype: str = "float32", also: bool = False):
        if also:
            self.before = declare((3,), ("x",), INIT, "float32")
        self.first = declare((4, 5), ("x", "y"), INIT, dtype)
        if also:
            self.later = declare((7,), ("x",), INIT, "float32")
        self.second = declare((4, 5), ("x", "y"), INIT, "float32")


def bits(variable) -> np.ndarray:
    return np.asarray(variable[...]).view(f"u{variable.dtype.itemsize}")


def test_one_seed_gives_one_set_of_bits():
    a, b, other = (materialise(Pair(), seed) for seed in (3, 3, 4))
    np.testing.assert_array_equal(bits(a.first), bits(b.first))
    assert (bits(a.first) != bits(other.first)).any()


def test_a_leaf_does_not_depend_on_the_others():
    alone, among = materialise(Pair(), 0), materialise(Pair(also=True), 0)
    np.testing.assert_array_equal(bits(alone.first), bits(among.first))
    np.testing.assert_array_equal(bits(alone.second), bits(among.second))
    assert (bits(alone.first) != bits(alone.second)).any()


def test_a_bf16_leaf_is_the_f32_leaf_rounded_once():
    wide, narrow = materialise(Pair(), 0), materialise(Pair(dtype="bfloat16"), 0)
    assert (narrow.first.dtype, narrow.second.dtype) == (jnp.bfloat16, jnp.float32)
    rounded = np.asarray(wide.first[...]).astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(rounded.view(np.uint16), bits(narrow.first))


def test_the_declared_model_is_not_changed():
    declared = Pair()
    materialise(declared, 0)
    assert isinstance(declared.first.get_value(), jax.ShapeDtypeStruct)


def test_normal_and_constant_initialisers(rng):
    drawn = Normal(0.02).draw(rng, (400, 300))
    assert drawn.dtype == np.float32
    assert abs(drawn.std() - 0.02) < 2e-4 and abs(drawn.mean()) < 2e-4
    for init, value in ((ONES, 1.0), (ZEROS, 0.0), (Constant(0.25), 0.25)):
        np.testing.assert_array_equal(init.draw(rng, (2, 3)), np.full((2, 3), value, np.float32))


def test_sharding_is_asked_for_by_path():
    asked = {}

    def sharding(path, variable):
        asked[path] = variable.shape
        return jax.sharding.SingleDeviceSharding(jax.devices()[1])

    model = materialise(Pair(), 0, sharding=sharding)
    assert asked == {"first": (4, 5), "second": (4, 5)}
    assert model.first[...].devices() == {jax.devices()[1]}


def test_names_must_be_as_many_as_axes():
    with pytest.raises(ValueError, match=r"shape \(2, 3\) has 2 axes, names are \('x',\)"):
        declare((2, 3), ("x",), INIT, "float32")


@pytest.mark.parametrize("name", PRESETS)
def test_every_parameter_names_each_of_its_axes_once(name):
    for path, variable in leaves(GlmModel.abstract(preset(name))):
        axes = variable.get_metadata("logical_axes")
        assert len(axes) == len(variable.shape), path
        assert len(set(axes)) == len(axes), path
        assert ("layers" in axes) == (path.startswith("segments.")), path


def test_router_and_its_bias_stay_f32_and_the_bias_is_no_parameter():
    kinds = {}
    for path, variable in leaves(GlmModel.abstract(preset("glm-5.2"))):
        kinds.setdefault((path.rpartition(".")[2], variable.dtype.name), set()).add(type(variable))
    f32 = {name: kind for (name, dtype), kind in kinds.items() if dtype == "float32"}
    assert f32 == {"router": {nnx.Param}, "router_bias": {Buffer}}
