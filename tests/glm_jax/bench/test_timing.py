"""The clock of the benchmarks. No test says how long anything takes."""

import time

import jax.numpy as jnp

from glm_jax.bench.timing import Sample, Spread, clocked, interleaved, median_cpu_s, median_wall_s


def sample(wall_s: float, cpu_s: float = 0.0) -> Sample:
    return Sample(wall_s=wall_s, cpu_s=cpu_s)


def test_tasks_take_turns_and_warm_up_rounds_are_not_kept():
    order, rounds = [], []

    def task(name):
        def run():
            order.append(name)
            return sample(len(order))

        return run

    samples = interleaved(
        {"a": task("a"), "b": task("b")},
        2,
        warm_up=1,
        progress=lambda done, of: rounds.append((done, of)),
    )
    assert order == ["a", "b"] * 3
    assert samples == {"a": [sample(3), sample(5)], "b": [sample(4), sample(6)]}
    assert rounds == [(1, 3), (2, 3), (3, 3)]


def test_a_sample_holds_seconds_that_passed_and_seconds_of_cpu():
    asleep = clocked(lambda: time.sleep(0.05))()
    assert asleep.wall_s >= 0.05
    assert asleep.cpu_s < asleep.wall_s
    assert clocked(lambda: jnp.ones(3))().wall_s > 0.0


def test_medians_and_spread():
    samples = [sample(3.0, 30.0), sample(1.0, 10.0), sample(2.0, 50.0)]
    assert (median_wall_s(samples), median_cpu_s(samples)) == (2.0, 30.0)
    assert Spread.of(x.wall_s for x in samples) == Spread(median=2.0, min=1.0, max=3.0)
