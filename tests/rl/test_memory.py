"""A run that cannot fit is refused before anything is allocated."""

import dataclasses

import jax
import pytest

from glm_jax.errors import GlmError
from glm_jax.model import GlmModel
from rl import memory
from rl.memory import needed_bytes, require_memory
from rl.recipe import EngineRecipe, ModelRecipe, Recipe, TrainerRecipe
from rl.run import config_of, contract_of, make_trainer, run


def asked(recipe):
    """Model and contract of a recipe, without an array."""
    contract = contract_of(recipe)
    return GlmModel.abstract(config_of(recipe, recipe.environment())), contract


HUGE = [
    (Recipe(model=ModelRecipe(hidden_size=10**8)), "sizes of the model"),
    (Recipe(model=ModelRecipe(n_routed_experts=2 * 10**9)), "sizes of the model"),
    (Recipe(engine=EngineRecipe(n_slots=2**20, n_rows=2**21, capacity=2**16)), "engine.n_slots"),
    (
        Recipe(
            model=ModelRecipe(num_hidden_layers=99, indexer_types=("full",) * 99),
            trainer=TrainerRecipe(rows_per_batch=2**21),
        ),
        "trainer.rows_per_batch",
    ),
]


@pytest.mark.parametrize(("recipe", "keys"), HUGE)
def test_what_needs_most_is_named_with_its_keys(recipe, keys, tmp_path):
    recipe = dataclasses.replace(recipe, out=str(tmp_path / "run"))
    with pytest.raises(GlmError, match=rf"needs at least .* GiB are there; .*lower .*{keys}"):
        run(recipe)
    assert not (tmp_path / "run").exists()


def test_the_bound_is_below_what_a_trainer_holds():
    recipe = Recipe()
    model, contract = asked(recipe)
    weights, _ = needed_bytes(recipe, model, contract)["weights, moments and gradients"]
    trainer = make_trainer(recipe, recipe.environment(), contract)
    n_params = sum(x.size for x in jax.tree.leaves(trainer.model))
    assert 4 * 4 * n_params < weights < 100 * n_params


def test_a_recipe_that_just_fits_is_not_refused(monkeypatch):
    recipe = Recipe()
    model, contract = asked(recipe)
    needs = sum(n for n, _ in needed_bytes(recipe, model, contract).values())
    monkeypatch.setattr(memory, "available_bytes", lambda: needs)
    require_memory(recipe, model, contract)
    monkeypatch.setattr(memory, "available_bytes", lambda: needs - 1)
    with pytest.raises(GlmError):
        require_memory(recipe, model, contract)
