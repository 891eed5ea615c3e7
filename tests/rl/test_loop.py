"""The loop: its order, its records, and that a killed run ends like one that was not."""

import collections
import contextlib
import dataclasses
import io
import json
import os

import numpy as np
import pytest
from rich.console import Console

from glm_jax.errors import GlmError
from glm_jax.numerics.contract import NumericsContract
from rl.display import Display
from rl.loop import FIRST_PROBLEM, Loop
from rl.recipe import CheckpointRecipe, EvalRecipe, Recipe, RlRecipe, SftRecipe
from rl.run_directory import (
    DROPPED,
    EVALUATION,
    METRICS,
    SAMPLES,
    WARM_START,
    RunDirectory,
    read_records,
)
from tests.rl.fakes import DigitSum, FakeEngine, FakeTrainer, Fuse, KilledError

REQUIRED = {
    *("step", "reward/mean", "reward/correct", "kl/k1", "kl/k3", "kl/max_abs"),
    *("kl/unequal_tokens", "ppo/clip_frac", "tokens/generated", "weights/digest"),
    *("time/generate", "time/sync", "time/update"),
}


def recipe_at(out, **rl):
    return Recipe(
        out=str(out),
        sft=SftRecipe(steps=3, batch_size=2, warmup_steps=0),
        rl=RlRecipe(**{"steps": 5, "problems": 4, "group_size": 2, "max_tokens": 4, **rl}),
        eval=EvalRecipe(problems=3),
        checkpoint=CheckpointRecipe(every=2, keep=2),
    )


class Begun:
    """A run with fakes; `run` may be killed by its fuse."""

    def __init__(self, out, fuse=None, environment=None, mode="pinned", **rl):
        fuse = fuse or Fuse()
        self.recipe, self.notes = recipe_at(out, **rl), []
        self.trainer, self.engine = FakeTrainer(fuse), FakeEngine(fuse)
        self.environment = environment or DigitSum(fuse)
        self.text = io.StringIO()
        contract = NumericsContract(mode=mode)
        self.directory = RunDirectory(self.recipe, contract, self.notes.append)

    def run(self):
        with (
            Display(Console(file=self.text, width=200)) as display,
            contextlib.closing(self.directory),
        ):
            Loop(
                self.recipe, self.environment, self.trainer, self.engine, self.directory, display
            ).run()
        return self

    def records(self):
        """All that a run leaves behind, without its times."""
        files = (WARM_START, METRICS, SAMPLES, EVALUATION)
        untimed = [
            {k: v for k, v in record.items() if not k.startswith(("time/", "engine/"))}
            for file in files
            for record in self.directory.records(file)
        ]
        return self.trainer.digest(), untimed


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """An uninterrupted run, and how often it passed each place."""
    fuse = Fuse()
    begun = Begun(tmp_path_factory.mktemp("runs") / "whole", fuse).run()
    begun.passed = collections.Counter(fuse.passed)
    return begun


def test_every_step_has_the_metrics_that_are_promised(whole):
    steps = whole.directory.records(METRICS)
    assert [step["step"] for step in steps] == [1, 2, 3, 4, 5]
    for step in steps:
        assert not REQUIRED - set(step)
        assert step["kl/unequal_tokens"] == 0 and step["kl/coverage"] == 1
        assert step["policy/versions_behind"] == 0
    assert len({step["weights/digest"] for step in steps}) == 5


def test_supervised_steps_come_first_on_problems_that_rl_never_sees(whole):
    losses = [loss for loss, _ in whole.trainer.seen]
    assert losses == ["cross_entropy"] * 3 + ["ppo"] * 5
    shown = [datum.tokens.tolist() for _, data in whole.trainer.seen[:3] for datum in data]
    assert len(shown) == 6 and len(set(map(tuple, shown))) == 6
    assert whole.directory.records(METRICS)[0]["groups/dropped"] == 0
    problems = {record["problem"] for record in whole.directory.records(SAMPLES)}
    assert min(problems) == FIRST_PROBLEM


def test_the_engine_has_the_new_weights_before_it_samples_again(whole):
    trained = [record["weights/version"] for record in whole.directory.records(METRICS)]
    assert trained == [4, 5, 6, 7, 8]
    assert (whole.engine.weights, whole.engine.version) == (whole.trainer.weights, 8)


def test_held_out_problems_are_answered_greedily_before_and_after(whole):
    assert [record["step"] for record in whole.directory.records(EVALUATION)] == [0, 5]
    for call in (whole.engine.calls[0], whole.engine.calls[-1]):
        assert len(call[0]) == 3 and all(p.temperature == 0 for p in call[1])


def test_weights_of_tokens_sum_to_one_in_every_mean(tmp_path):
    for aggregation in ("token", "sequence"):
        begun = Begun(tmp_path / aggregation, aggregation=aggregation).run()
        for _, data in begun.trainer.seen:
            total = sum(datum.weights.sum(dtype=np.float64) for datum in data)
            assert total == pytest.approx(1, rel=1e-6)
    begun = Begun(tmp_path / "constant", aggregation="constant").run()
    _, data = begun.trainer.seen[-1]
    assert {float(w) for datum in data for w in datum.weights} == {0.0, 1 / (8 * 4)}


PLACES = {
    "demonstration": 6,
    "forward_backward": 8,
    "optim_step": 8,
    "save_state": 4,
    "within save_state": 4,
    "saved": 4,
    "set_weights": 6,
    "generate": 7,
    "episode": 46,
    "step": 46,
}


def test_the_places_are_all_that_a_run_passes(whole):
    assert whole.passed == PLACES


@pytest.mark.parametrize("place", PLACES)
def test_a_run_killed_anywhere_ends_like_one_that_was_not(whole, place, tmp_path):
    for left in range(0, PLACES[place], 5 if PLACES[place] > 10 else 1):
        out = tmp_path / str(left)
        with pytest.raises(KilledError):
            Begun(out, Fuse(place, left)).run()
        assert Begun(out).run().records() == whole.records(), left


def test_a_run_killed_again_and_again_ends_like_one_that_was_not(whole, tmp_path):
    n_kills = 0
    for _ in range(30):
        try:
            begun = Begun(tmp_path / "run", Fuse("forward_backward", 3)).run()
            break
        except KilledError:
            n_kills += 1
    assert n_kills > 1 and begun.records() == whole.records()


def test_half_written_records_and_checkpoints_are_skipped_with_a_message(whole, tmp_path):
    out = tmp_path / "run"
    with pytest.raises(KilledError):
        Begun(out, Fuse("generate", 6)).run()
    newest, older = Begun(out).directory.checkpoints()
    assert (newest.name, older.name) == ("step-000008", "step-000007")
    (newest / "state.json").unlink()
    left_over = out / "checkpoints" / ".step-000009.partial-abcd"
    left_over.mkdir()
    with (out / METRICS).open("a") as lines:
        lines.write('{"step": 6, "rewa')
    again = Begun(out).run()
    assert again.records() == whole.records()
    assert any("step-000009.partial-abcd was only half written" in x for x in again.notes)
    assert any("step-000008 cannot be used: skipped" in x for x in again.notes)
    assert "resumed after 3 supervised and 4 RL steps" in again.text.getvalue()
    assert not left_over.exists()
    assert (out / "checkpoints" / "unusable-step-000008").is_dir()


def test_a_run_without_any_usable_checkpoint_starts_anew(whole, tmp_path):
    with pytest.raises(KilledError):
        Begun(tmp_path / "run", Fuse("generate", 5)).run()
    for path in Begun(tmp_path / "run").directory.checkpoints():
        (path / "state.json").write_text("{}")
        (path / "state.json").unlink()
    assert Begun(tmp_path / "run").run().records() == whole.records()


def test_another_seed_gives_another_run(whole, tmp_path):
    """The control of the tests above: equal digests are no accident."""
    begun = Begun(tmp_path / "run")
    begun.recipe = dataclasses.replace(begun.recipe, seed=1)
    assert begun.run().records()[0] != whole.records()[0]


def test_checkpoints_are_few_and_whole(whole):
    names = [path.name for path in whole.directory.checkpoints()]
    assert names == ["step-000008", "step-000007"]


def test_another_recipe_or_contract_is_refused_by_the_keys_that_differ(whole):
    out = whole.recipe.out
    with pytest.raises(GlmError, match=r"another recipe \(rl\.steps: 4 here, 5 there\).*out=DIR"):
        Begun(out, steps=4)
    with pytest.raises(GlmError, match=r"rl\.steps: 6 here, 5 there; rl\.schedule: 'cosine'"):
        Begun(out, steps=6, schedule="cosine")
    with pytest.raises(GlmError, match=r"mode: native here, pinned there"):
        Begun(out, mode="native")
    assert Begun(out).run().records() == whole.records()


def test_a_run_made_longer_ends_like_one_that_was_as_long_from_the_start(tmp_path):
    wanted = Begun(tmp_path / "long", steps=8).run().records()[0]
    short = Begun(tmp_path / "run").run()
    short.directory.write_summary({"steps": 5})
    longer = Begun(tmp_path / "run", steps=8)
    assert longer.directory.summary is None
    assert longer.run().records()[0] == wanted != short.trainer.digest()
    assert [r["step"] for r in longer.directory.records(EVALUATION)] == [0, 5, 8]
    with pytest.raises(GlmError, match=r"rl\.steps: 5 here, 8 there"):
        Begun(tmp_path / "run")


def test_two_processes_cannot_run_in_one_place(tmp_path):
    first = Begun(tmp_path / "run")
    with pytest.raises(GlmError, match=rf"process {os.getpid()} is running it.*out=DIR"):
        Begun(tmp_path / "run")
    first.run()
    Begun(tmp_path / "run").directory.close()


def test_a_run_killed_while_its_directory_was_made_starts(whole, tmp_path):
    out = tmp_path / "run"
    (out / "checkpoints").mkdir(parents=True)
    (out / ".lock").touch()
    assert Begun(out).run().records() == whole.records()


def test_a_directory_that_is_no_run_is_left_alone(tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(GlmError, match="is not empty and no run"):
        Begun(tmp_path)
    with pytest.raises(GlmError, match=r"out = .*thesis"):
        Begun(tmp_path / "thesis.txt")
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_dropped_groups_are_counted_and_the_run_goes_on(tmp_path):
    failing = {FIRST_PROBLEM + 5: "nan", FIRST_PROBLEM + 9: "raises", FIRST_PROBLEM + 14: "huge"}
    begun = Begun(tmp_path / "run", environment=DigitSum(failing=failing)).run()
    dropped = [step["groups/dropped"] for step in begun.directory.records(METRICS)]
    assert dropped == [0, 1, 1, 1, 0]
    assert len(begun.trainer.seen[4][1]) == 6
    reasons = {r["problem"] - FIRST_PROBLEM: r["error"] for r in begun.directory.records(DROPPED)}
    assert reasons == {
        5: "ValueError: reward is nan; need numbers below 1e+30",
        9: "RuntimeError: the checker broke",
        14: "ValueError: reward is 1e+308; need numbers below 1e+30",
    }
    shown = "step 3: dropped 1 of 4 groups; problem 1073741833: RuntimeError: the checker broke"
    assert shown in begun.text.getvalue()


def test_a_demonstration_that_raises_is_named(tmp_path):
    begun = Begun(tmp_path / "run", environment=DigitSum(failing={3: "demonstration"}))
    message = "supervised step 2: environment: demonstration 3 raised RuntimeError: no solution"
    with pytest.raises(GlmError, match=message):
        begun.run()


def test_an_environment_that_mostly_fails_stops_the_run_and_names_the_checkpoint(tmp_path):
    failing = dict.fromkeys(range(FIRST_PROBLEM + 12, FIRST_PROBLEM + 15), "raises")
    begun = Begun(tmp_path / "run", environment=DigitSum(failing=failing))
    message = r"RL step 4: environment: 3 of 4 .*the checker broke; the last checkpoint is .*000005"
    with pytest.raises(GlmError, match=message):
        begun.run()
    assert len(begun.directory.records(METRICS)) == 3


def test_a_value_that_is_not_finite_stops_before_the_update_and_keeps_the_checkpoint(tmp_path):
    begun = Begun(tmp_path / "run", Fuse("optim_step", 6, GlmError))
    with pytest.raises(GlmError, match=r"RL step 4: at optim_step; the last checkpoint is"):
        begun.run()
    assert begun.trainer.version == 6
    assert begun.directory.restore(FakeTrainer().load_state) == {"sft": 3, "rl": 2}


def test_metrics_that_are_not_finite_are_never_written(whole):
    with pytest.raises(ValueError, match="not JSON compliant"):
        whole.directory.append("other.jsonl", {"loss": float("nan")})


def test_records_that_are_no_text_are_refused_by_name(tmp_path):
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 1}\n\xff\xfe\n')
    with pytest.raises(GlmError, match=r"metrics\.jsonl: is no UTF-8 text"):
        read_records(tmp_path / "metrics.jsonl")


def test_plain_lines_show_every_step_under_one_heading(whole):
    lines = whole.text.getvalue().splitlines()
    (heading,) = [line for line in lines if "unequal" in line]
    assert heading.split()[:5] == ["step", "reward", "correct", "k1", "k3"]
    rows = lines[lines.index(heading) + 1 :][:5]
    assert [row.split()[0] for row in rows] == ["1", "2", "3", "4", "5"]
    assert "held-out problems after RL step 5" in lines[-1]


def test_a_terminal_gets_one_table_with_the_last_rows():
    text = io.StringIO()
    console = Console(file=text, force_terminal=True, width=160, height=20)
    with Display(console) as display:
        for step in range(1, 31):
            display.step({"step": step, "reward/mean": 0.5})
    last = text.getvalue().rpartition("unequal")[2]
    assert "30" in last and "23" in last and " 5 " not in last


def test_records_are_json_lines(whole):
    for line in (whole.directory.path / METRICS).read_text().splitlines():
        assert isinstance(json.loads(line), dict)
