"""Every setting is checked when it is made."""

import numpy as np
import pytest

from glm_jax.errors import GlmError
from serving.engine import SamplingParams


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", 1.5),
        ("n", 0),
        ("n", 2**16 + 1),
        ("temperature", -1),
        ("temperature", 1e-6),
        ("temperature", float("nan")),
        ("temperature", "hot"),
        ("top_p", 0),
        ("top_p", 1.1),
        ("min_p", 1),
        ("top_k", -1),
        ("seed", -1),
        ("seed", 2**32),
        ("min_tokens", 500),
        ("first_sample", 2**31 - 1),
        ("top_logprobs", True),
        ("prompt_logprobs", 1),
        ("stop_ids", 3),
        ("stop_ids", (1.5,)),
        ("stop", "text"),
        ("stop", ("",)),
    ],
)
def test_a_bad_value_is_named(name, value):
    with pytest.raises(GlmError, match=name):
        SamplingParams(**{name: value})


def test_numbers_of_numpy_and_lists_are_taken():
    params = SamplingParams(seed=np.int64(7), stop_ids=[np.int32(3)], stop=["x"])
    assert params == SamplingParams(seed=7, stop_ids=(3,), stop=("x",))
    assert hash(params)
