"""Recipes: every mistake is named by its dotted key before any work."""

import subprocess
import sys
import tomllib

import pytest

from glm_jax.errors import GlmError
from rl.cli import main as cli
from rl.recipe import Recipe, differing_keys, read_recipe
from rl.recipe_fields import flatten, read_toml
from tests.conftest import ROOT

COUNTDOWN = ROOT / "recipes" / "countdown.toml"


@pytest.fixture
def file(tmp_path):
    def write(text):
        path = tmp_path / "mine.toml"
        path.write_text(text)
        return path

    return write


def test_every_recipe_of_the_repository_can_run_and_has_sparse_attention():
    for path in sorted(COUNTDOWN.parent.glob("*.toml")):
        recipe = read_recipe(path)
        environment = recipe.environment()
        cfg = recipe.config(environment.tokenizer.vocab_size, environment.stop_ids)
        longest = environment.longest_prompt + environment.longest_answer
        assert cfg.index_topk < longest and "shared" in cfg.indexer_types


def test_overrides_win_and_values_have_the_fields_types():
    words = ["seed=7", "out=some/where", "rl.steps=6", "rl.learning_rate=1", "env.operators=+-"]
    recipe = read_recipe(COUNTDOWN, words, numerics="native")
    assert (recipe.seed, recipe.out, recipe.rl.steps) == (7, "some/where", 6)
    assert recipe.env.operators == "+-" and recipe.numerics.mode == "native"
    assert recipe.rl.learning_rate == 1.0 and isinstance(recipe.rl.learning_rate, float)
    listed = read_recipe(COUNTDOWN, ['model.indexer_types=["full", "shared", "full"]'])
    assert listed.model.indexer_types == ("full", "shared", "full")


def test_runs_of_other_modes_and_seeds_get_places_of_their_own():
    assert read_recipe(COUNTDOWN).out == "runs/countdown"
    assert read_recipe(COUNTDOWN, ["seed=3"], numerics="native").out == (
        "runs/countdown-native-seed3"
    )


def test_the_printed_recipe_is_the_recipe(file):
    recipe = read_recipe(COUNTDOWN, ['out=a "quoted" \\ place', "rl.learning_rate=1e-05"])
    again = read_recipe(file(recipe.to_toml()))
    assert again == recipe and not differing_keys(recipe, flatten(again))


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("rl.step=6", r"rl\.step = 6: is unknown; did you mean 'rl\.steps'\?"),
        ("model.hiden_size=6", "did you mean 'model.hidden_size'"),
        ("sede=6", "did you mean 'seed'"),
        ("rl=6", "rl = 6: is a section"),
        ("rl.steps.x=6", r"rl\.steps\.x = 6: is unknown"),
        ("rl.steps=six", "rl.steps = 'six': is not a whole number"),
        ("rl.steps=6.0", "rl.steps = 6.0: is not a whole number"),
        ("rl.steps=true", "rl.steps = True: is not a whole number"),
        ("rl.steps=-1", "rl.steps = -1: is below 0"),
        ("rl.steps=", "rl.steps = '': is not a whole number"),
        ("seed=4294967296", "seed = 4294967296: is too large"),
        ("out=3", "out = 3: is not a string"),
        ("rl.learning_rate=fast", "rl.learning_rate = 'fast': is not a number"),
        ("rl.learning_rate=nan", "rl.learning_rate = nan: is not finite"),
        ("rl.learning_rate=0", "rl.learning_rate = 0: is not above 0"),
        ("rl.group_size=1", "rl.group_size = 1: is below 2"),
        ("rl.problems=100000000000", "rl.problems = 100000000000: is above 1048576"),
        ("rl.group_size=131072", "rl.group_size = 131072: makes more than 1048576 samples a step"),
        ("sft.batch_size=1000000000", "sft.batch_size = 1000000000: is above 1048576"),
        ("sft.steps=1000000000", "sft.steps = 1000000000: are more than 1073741824 demonst"),
        ("eval.problems=1000000000", "eval.problems = 1000000000: is above 1048576"),
        ("rl.loss=pp0", "rl.loss = 'pp0': is no choice; did you mean 'ppo'"),
        ("rl.top_p=1.5", "rl.top_p = 1.5: is above 1"),
        ("rl.top_k=24", "rl.top_k = 24: is more than the vocabulary, 23"),
        ("rl.max_tokens=4", "rl.max_tokens = 4: is below the longest solution, 8"),
        ("rl.warmup_steps=26", "rl.warmup_steps = 26: is more than rl.steps = 25"),
        ("engine.capacity=16", "engine.capacity = 16: is below the 22 tokens"),
        ("engine.n_rows=64", "engine.n_rows = 64: is not above engine.n_slots = 64"),
        ("trainer.rows_per_batch=31", "trainer.rows_per_batch = 31: is below engine.capacity"),
        ("env.numbers=9", "env.numbers: 9; must be 2 to 6"),
        ("env.largest_target=0", "env.largest_target: 0; must be at least 1"),
        ("model.num_experts_per_tok=9", "model.num_experts_per_tok = 9: is more than"),
        ("model.hidden_size=0", "model.hidden_size = 0"),
        ("model.num_hidden_layers=4", "model.indexer_types = .*num_hidden_layers = 4"),
        ('model.indexer_types=["full", 3]', "model.indexer_types = .*is no list of strings"),
        ("numerics.mode=fast", "numerics.mode = 'fast': is no choice"),
        ("numerics.token_leaf=0", "numerics.token_leaf = 0: is below 1"),
        ("seed", "'seed': is no KEY=VALUE"),
        ("=3", "'=3': is no KEY=VALUE"),
    ],
)
def test_a_mistake_is_named_by_its_key(file, word, message):
    """Of the defaults, so that a tuned recipe changes no test."""
    with pytest.raises(GlmError, match=message):
        read_recipe(file(""), [word])


def test_mistakes_are_listed_together(file):
    with pytest.raises(GlmError, match=r"mine\.toml: 3 fields(.|\n)*seed(.|\n)*rl\.stps"):
        read_recipe(file("seed = 1.5\n[rl]\nstps = 3\nsteps = 'x'\n"))


def test_a_key_given_twice_is_refused():
    with pytest.raises(GlmError, match="seed: is given twice, as 3 and '4'"):
        read_recipe(COUNTDOWN, ["seed=3", "seed=4"])


def test_files_that_are_no_recipe_are_refused(file, tmp_path):
    with pytest.raises(GlmError, match="is no TOML"):
        read_recipe(file("seed: 3"))
    with pytest.raises(GlmError, match="cannot be read"):
        read_recipe(tmp_path / "absent.toml")
    with pytest.raises(GlmError, match="cannot be read"):
        read_recipe(tmp_path)


def test_differing_keys_are_named_but_for_the_place():
    recipe = Recipe(seed=3, out="here")
    stored = {**flatten(Recipe(out="there")), "old.key": 1}
    assert differing_keys(recipe, stored) == [
        "seed: 3 here, 0 there",
        "old.key: None here, 1 there",
    ]


def test_a_dry_run_prints_the_recipe_alone_and_does_not_import_jax(tmp_path):
    code = (
        "import sys; from rl.cli import main\n"
        f"sys.argv[1:] = ['train', 'rl', {str(COUNTDOWN)!r}, 'rl.steps=6', '--dry-run']\n"
        "try: main.main()\n"
        "finally: assert 'jax' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=ROOT
    )
    assert done.returncode == 0 and done.stderr == ""
    assert tomllib.loads(done.stdout)["rl"]["steps"] == 6


def test_the_command_line_refuses_a_bad_recipe_before_any_work(monkeypatch, capsys, tmp_path):
    place = tmp_path / "run"
    arguments = ["train", "rl", str(COUNTDOWN), f"out={place}", "rl.stps=3"]
    monkeypatch.setattr(sys, "argv", ["glm-jax", *arguments])
    with pytest.raises(SystemExit) as leaving:
        cli.main()
    assert leaving.value.code == 2 and "did you mean 'rl.steps'" in capsys.readouterr().err
    assert not place.exists()


def test_toml_tables_are_read_by_dotted_key(file):
    assert read_toml(file("a = 1\n[b]\nc = [1, 2]\n")) == {"a": 1, "b.c": [1, 2]}
