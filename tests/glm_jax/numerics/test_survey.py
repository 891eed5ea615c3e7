"""The survey: it sees what changes with the number of rows, and pinned operations do not."""

import json
import re

import jax
import jax.numpy as jnp
import pytest

from glm_jax.batch import TokenBatch
from glm_jax.cache import LatentCache
from glm_jax.errors import GlmError
from glm_jax.forward import arithmetic, forward
from glm_jax.head import score
from glm_jax.model import GlmModel
from glm_jax.numerics import survey as module
from glm_jax.numerics.survey import survey
from glm_jax.presets import preset
from rl.cli import main

FEW = {"row_counts": (1, 2, 17), "reference_rows": 128, "priced": ()}
NAMES = ("matmul 256x80", "by head 8x 64->32", "sum of a row", "softmax")


def few(name: str) -> bool:
    return name.startswith(NAMES)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_no_pinned_operation_changes_with_the_number_of_rows_and_stock_ones_do(dtype):
    result = survey([dtype], select=few, **FEW)
    assert len(result.lines) == len(NAMES)
    for line in result.lines:
        assert line.pinned.unequal == 0, line.name
        assert line.pinned.compared == line.stock.compared > 0
    if dtype == "float32":
        changed = {line.name for line in result.lines if line.stock.unequal}
        assert len(changed) >= 3, changed


def test_a_stock_product_in_place_of_a_pinned_one_is_found(monkeypatch):
    def stock(x, w, contract):
        return jnp.matmul(x, w, preferred_element_type=jnp.float32)

    monkeypatch.setattr("glm_jax.numerics.arithmetic.pinned_matmul", stock)
    result = survey(["float32"], select=lambda name: name.startswith("matmul 256x80"), **FEW)
    assert result.lines[0].pinned.unequal > 0
    assert not result.ok


def test_a_survey_in_which_nothing_changes_proves_nothing():
    result = survey(["float32"], select=lambda name: name.startswith("rope"), **FEW)
    assert not result.lines[0].stock.unequal and not result.ok


def test_rows_and_names_that_do_not_fit_are_errors():
    with pytest.raises(GlmError, match="row_counts: 129 rows fill a bucket of 192"):
        survey(["float32"], row_counts=(129,), reference_rows=128)
    with pytest.raises(GlmError, match="select: no operation"):
        survey(["float32"], select=lambda name: False, **FEW)


def test_the_command_prints_the_counts_and_leaves_with_1_if_a_pinned_bit_changes(
    monkeypatch, capsys
):
    result = survey(["float32"], select=lambda name: name.startswith("sum of"), **FEW)
    monkeypatch.setattr(module, "survey", lambda *args, **kwargs: result)
    monkeypatch.setattr("sys.argv", ["glm-jax", "check", "ops", "--json"])
    with pytest.raises(SystemExit) as left:
        main.main()
    answer = json.loads(capsys.readouterr().out)
    assert left.value.code == (0 if result.ok else 1) and answer["ok"] == result.ok
    (line,) = answer["operations"]
    assert line["stock"]["unequal"] == sum(line["stock"]["unequal_by_rows"].values())
    assert line["pinned"]["unequal"] == 0 and line["dtype"] == "float32"


def test_no_library_fusion_of_the_forward_holds_an_exponential():
    # YNNPACK's exp differs from XLA's, and its fusion of max, exp and sum is wrong in jaxlib
    # 0.12.0.1 (docs/numerics.md): a select between them keeps them apart.
    cfg = preset("tiny").with_overrides(
        num_hidden_layers=2,
        first_k_dense_replace=1,
        mlp_layer_types=("dense", "sparse"),
        indexer_types=("full", "shared"),
        num_nextn_predict_layers=0,
        index_share_for_mtp_iteration=False,
    )
    batch = TokenBatch(*(jnp.zeros(64, jnp.int32),) * 3, jnp.ones(64, bool))
    cache = LatentCache.empty(cfg, 1, 64)

    def step(model, batch, cache, targets):
        out = forward(model, batch, cache)
        ops = arithmetic(cache, None)
        return score(model, ops, out.hidden_TD, targets, batch.n_used)

    lowered = jax.jit(step).lower(GlmModel.init(cfg), batch, cache, jnp.zeros(64, jnp.int32))
    assert _fused_exponentials(lowered.compile().as_text()) == 0


def _fused_exponentials(program: str) -> int:
    bodies = dict(re.findall(r"^%?([\w.\-]+) \(.*?\{\n(.*?)^\}", program, re.S | re.M))
    fused = re.findall(r"kind=kCustom, calls=%([\w.\-]+)", program)
    return sum("exponential(" in bodies[name] for name in fused)


def test_the_search_for_fused_exponentials_finds_one():
    def softmax(x):
        weight = jnp.exp(x - jnp.max(x, axis=-1, keepdims=True))
        return weight / jnp.sum(weight, axis=-1, keepdims=True)

    program = jax.jit(softmax).lower(jnp.zeros((1024, 64))).compile().as_text()
    if "kind=kCustom" not in program:
        pytest.skip("this backend has no library fusions")
    assert _fused_exponentials(program) > 0
