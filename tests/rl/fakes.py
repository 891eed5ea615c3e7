"""A fake engine, trainer and environment: a run's loop without a model.

The trainer's weights are one whole number that every step hashes with its data, so that two runs
end with the same digest only if they took the same steps on the same data.
"""

import dataclasses
import hashlib
import json
import types

import numpy as np

from glm_jax.checkpoint.directories import replace_directory
from glm_jax.errors import GlmError
from glm_jax.tokenizer import character_tokenizer
from rl.envs import Answer, Demonstration
from serving.engine import Completion, EngineStats

TOKENIZER = character_tokenizer("0123456789")
EOS = TOKENIZER.id_of("<eos>")


class KilledError(BaseException):
    """Stands for `kill -9`: nothing may catch it."""


class Fuse:
    """Raises when it has been passed `left` times at `place`."""

    def __init__(self, place=None, left=0, error=KilledError):
        self.place, self.left, self.error, self.passed = place, left, error, []

    def __call__(self, place):
        self.passed.append(place)
        if place == self.place:
            self.left -= 1
            if self.left < 0:
                raise self.error(f"at {place}")


class FakeTrainer:
    def __init__(self, fuse=None):
        self.version, self.weights, self.gradient = 0, 0, None
        self.fuse = fuse or Fuse()
        self.seen = []

    @property
    def model(self):
        return self.weights

    def forward_backward(self, data, loss_fn, loss_fn_config=None):
        self.fuse("forward_backward")
        self.gradient = hashlib.sha256(repr((loss_fn, loss_fn_config)).encode())
        for datum in data:
            self.gradient.update(datum.key()[1])
        self.seen.append((loss_fn, data))
        metrics = {"loss:sum": 1.5}
        logprobs = [d.loss_fn_inputs.get("logprobs", d.weights) for d in data]
        if loss_fn != "cross_entropy":
            metrics |= {"ppo/clip_frac": 0.0, "ppo/ratio_max": 1.0}
        return types.SimpleNamespace(logprobs=logprobs, metrics=metrics)

    def optim_step(self, params):
        self.fuse("optim_step")
        self.gradient.update(repr((self.weights, dataclasses.astuple(params))).encode())
        self.weights = int.from_bytes(self.gradient.digest()[:8])
        self.version += 1
        return {"optim/grad_norm": 1.0, "optim/lr": params.learning_rate}

    def digest(self):
        return f"{self.weights:016x}"

    def save_state(self, directory, more=None):
        self.fuse("save_state")
        with replace_directory(directory, overwrite=True) as partial:
            (partial / "config.json").write_text("{}")
            self.fuse("within save_state")
            state = {"weights": self.weights, "version": self.version, "more": more}
            (partial / "state.json").write_text(json.dumps(state))
        self.fuse("saved")

    def load_state(self, directory):
        file = directory / "state.json"
        if not file.is_file():
            raise GlmError(f"{directory}: has no state.json")
        state = json.loads(file.read_text())
        self.weights, self.version = state["weights"], state["version"]
        return state["more"]


class FakeEngine:
    """Digits that are a function of prompt, weights, seed and number of the sample."""

    capacity = 24

    def __init__(self, fuse=None):
        self.fuse, self.stats = fuse or Fuse(), EngineStats()
        self.weights, self.version, self.calls = 0, 0, []

    def set_weights(self, model, version):
        self.fuse("set_weights")
        self.weights, self.version = model, version

    def generate(self, prompts, params):
        self.fuse("generate")
        self.calls.append((prompts, params))
        self.stats = self.stats.plus(n_steps=1)
        return [[self._sample(p, q)] for p, q in zip(prompts, params, strict=True)]

    def _sample(self, prompt, params):
        assert params.n == 1 and len(prompt) + params.max_tokens <= self.capacity
        key = repr((list(prompt), params.seed, params.first_sample, self.weights))
        drawn = hashlib.sha256(key.encode()).digest()
        n = 1 + drawn[0] % params.max_tokens
        ids = [3 + byte % 10 for byte in drawn[1 : n + 1]]
        ended = n < params.max_tokens
        ids[-1] = EOS if ended else ids[-1]
        logprobs = np.asarray([-1 - byte / 256 for byte in drawn[1 : n + 1]], np.float32)
        return Completion(
            index=params.first_sample,
            token_ids=np.asarray(ids, np.int32),
            logprobs=logprobs,
            sampling_logprobs=logprobs,
            weight_versions=np.full(n, self.version, np.int32),
            finish_reason="stop" if ended else "length",
        )


class DigitSum:
    """Rewards the last digit of a sum. A problem may be told to fail, or to take several turns."""

    tokenizer, stop_ids, longest_prompt, longest_answer = TOKENIZER, (EOS,), 6, 4

    def __init__(self, fuse=None, failing=None, n_turns=1):
        self.fuse, self.failing, self.n_turns = fuse or Fuse(), failing or {}, n_turns

    def episode(self, split, index):
        self.fuse("episode")
        return DigitSumEpisode(self, split, index)

    def demonstration(self, index):
        self.fuse("demonstration")
        if self.failing.get(index) == "demonstration":
            raise RuntimeError("no solution")
        return Demonstration(TOKENIZER.encode(f"{index % 1000}"), [3 + index % 10, EOS])


class DigitSumEpisode:
    def __init__(self, environment, split, index):
        self.environment, self.n_taken = environment, 0
        self.failure = environment.failing.get(index) if split == "train" else None
        self.prompt = TOKENIZER.encode(f"{index % 1000}" if split == "train" else f"9{index}")
        if self.failure == "episode":
            raise RuntimeError("no such problem")
        if self.failure == "prompt":
            self.prompt = [99]

    def step(self, action):
        self.environment.fuse("step")
        self.n_taken += 1
        if self.failure == "raises":
            raise RuntimeError("the checker broke")
        reward = float(sum(map(int, action)) % 10) / 10
        reward = {"nan": float("nan"), "inf": float("inf"), "huge": 1e308}.get(self.failure, reward)
        done = self.n_taken == self.environment.n_turns
        given = {"observation": [99], "long": [4] * 500}.get(self.failure, [4, 5])
        observation = [] if done else given
        metrics = {"correct": float(reward == 0.3)}
        if self.failure == "metric":
            metrics["odd"] = float("nan")
        return Answer(reward=reward, done=done, observation=observation, metrics=metrics)
