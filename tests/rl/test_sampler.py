"""The sampling client: the engine's samples under the names of the Tinker client."""

import numpy as np
import pytest

from glm_jax.errors import GlmError
from rl.sampler import SamplingClient
from serving.engine import Completion, SamplingParams

PARAMS = SamplingParams(max_tokens=5, seed=3, temperature=0.8)
PROMPT = [1, 7, 3]


class FakeEngine:
    """Gives completions made from the request."""

    def __init__(self):
        self.asked = []

    def generate(self, prompts, params):
        self.asked.append((prompts, params))
        if max(prompts[0]) > 20:
            raise GlmError("prompt 0: id 99 at index 1 is outside the vocabulary")
        return [[self._completion(prompts[0], params, i) for i in range(params.n)]]

    def _completion(self, prompt, params, index):
        n = params.max_tokens
        scores = -np.arange(1, len(prompt), dtype=np.float32) / 3
        return Completion(
            index=index,
            token_ids=np.arange(index, index + n, dtype=np.int32),
            logprobs=np.full(n, -1, np.float32),
            sampling_logprobs=np.full(n, -0.1 * (index + 1), np.float32),
            weight_versions=np.zeros(n, np.int32),
            finish_reason="length" if index else "stop",
            prompt_logprobs=scores if params.prompt_logprobs else None,
        )


def test_samples_are_the_engines_with_the_log_probabilities_they_were_drawn_with():
    engine = FakeEngine()
    response = SamplingClient(engine).sample(PROMPT, 2, PARAMS).result()
    assert [s.tokens for s in response.sequences] == [[0, 1, 2, 3, 4], [1, 2, 3, 4, 5]]
    assert [s.stop_reason for s in response.sequences] == ["stop", "length"]
    assert response.sequences[1].logprobs == [float(np.float32(-0.2))] * 5
    assert response.prompt_logprobs is None
    ((_, params),) = engine.asked
    assert (params.n, params.seed, params.temperature) == (2, 3, 0.8)


def test_prompts_are_scored_on_demand_and_their_first_token_has_no_score():
    client = SamplingClient(FakeEngine())
    scored = client.sample(PROMPT, 1, PARAMS, include_prompt_logprobs=True).result()
    assert scored.prompt_logprobs == [None, float(np.float32(-1 / 3)), float(np.float32(-2 / 3))]
    assert client.compute_logprobs(PROMPT).result() == scored.prompt_logprobs


def test_a_bad_request_is_an_error_of_the_future():
    future = SamplingClient(FakeEngine()).sample([1, 99], 1, PARAMS)
    with pytest.raises(GlmError, match="id 99 at index 1 is outside the vocabulary"):
        future.result()
