"""Models and trials of these tests."""

from glm_jax.invariance.program import Programs
from glm_jax.invariance.trial import Sizes, Trial
from glm_jax.model import GlmModel
from glm_jax.numerics.contract import NumericsContract
from tests.glm_jax.models import PINNED, SMALL, model_of

TWO = SMALL.with_overrides(
    num_hidden_layers=2,
    mlp_layer_types=("dense", "sparse"),
    indexer_types=("full", "full"),
    num_nextn_predict_layers=0,
)
"""A layer of each feed-forward, each with an indexer: quick to compile."""
LAST = TWO.num_hidden_layers - 1
SIZES = Sizes(n_sequences=2, capacity=72)
"""A prefill takes tiles of 256 rows, a decoding step one of 2."""


def trial_of(
    model: GlmModel | None = None,
    *,
    contract: NumericsContract = PINNED,
    sizes: Sizes = SIZES,
    alphabet: int | None = None,
) -> Trial:
    """A trial with fresh programs, so that what a test has patched is traced."""
    model = model or model_of(TWO)
    programs = Programs(model, contract)
    return Trial.draw(programs, programs.leaves_of(model), sizes, (0, 0), alphabet=alphabet)
