"""Every setting is checked when it is made."""

import pytest

from glm_jax.errors import GlmError
from serving.engine import SamplingParams


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", 1.5),
        ("n", 0),
        ("temperature", -1),
        ("temperature", 1e-6),
        ("temperature", float("nan")),
        ("top_p", 0),
        ("top_p", 1.1),
        ("min_p", 1),
        ("top_k", -1),
        ("seed", -1),
        ("seed", 2**32),
        ("min_tokens", 500),
        ("top_logprobs", True),
    ],
)
def test_a_bad_value_is_named(name, value):
    with pytest.raises(GlmError, match=name):
        SamplingParams(**{name: value})


def test_an_empty_stop_string_is_refused():
    with pytest.raises(GlmError, match="stop: an empty string"):
        SamplingParams(stop=("",))
