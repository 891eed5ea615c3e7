"""The checks on the values of a config's fields: types, ranges, and rules between fields."""

import math
from collections.abc import Mapping
from typing import Any

from glm_jax.config_fields import (
    DTYPES,
    FLOATS,
    INDEXER_TYPES,
    LARGEST_SIZE,
    MLP_TYPES,
    OPTIONAL_INTS,
    SIZES,
    Problems,
    dense_first,
    describe,
    is_int,
    is_number,
)
from glm_jax.config_quantization import Fp8Quantization


def check(values: Mapping[str, Any], problems: Problems) -> None:
    """Adds to `problems` every field of `values` that is missing, mistyped or contradictory.

    A field already in `problems` is left alone, and a rule between fields runs only when each of
    them is sound by itself, so one mistake gives one line.
    """
    checker = _Checker(values, problems)
    checker.sizes()
    checker.numbers()
    checker.choices()
    checker.dense_count()
    checker.layer_types("indexer_types", INDEXER_TYPES, given_by="index_topk_pattern")
    checker.layer_types("mlp_layer_types", MLP_TYPES, given_by="first_k_dense_replace")
    checker.layer_order()
    checker.relations()
    checker.tokens()


_LACKING = "is missing or null"


class _Checker:
    def __init__(self, values: Mapping[str, Any], problems: Problems) -> None:
        self.values = values
        self.problems = problems

    def bad(self, field: str, reason: str, remedy: str) -> None:
        """Notes a problem, unless the field has one already."""
        self.problems.setdefault(field, describe(field, self.values.get(field), reason, remedy))

    def sound(self, field: str) -> Any:
        """The value of a field that has no problem, else None."""
        return None if field in self.problems else self.values.get(field)

    def sizes(self) -> None:
        for field in SIZES:
            value = self.values.get(field)
            if value is None:
                remedy = "give the whole number the model was trained with"
                self.bad(field, _LACKING, remedy)
            elif not is_int(value) or not 1 <= value <= LARGEST_SIZE:
                self.bad(field, f"must be a whole number from 1 to {LARGEST_SIZE}", "correct it")
        for field, least in OPTIONAL_INTS.items():
            value = self.values.get(field)
            if value is not None and (not is_int(value) or value < least):
                reason = f"must be a whole number of at least {least}"
                self.bad(field, reason, "correct or remove it")

    def numbers(self) -> None:
        for field in FLOATS:
            value = self.values.get(field)
            if value is None:
                self.bad(field, _LACKING, "give the number the model was trained with")
            elif not is_number(value) or not _finite_above_zero(value):
                remedy = "correct it (a JSON number, not a string)"
                self.bad(field, "must be a finite number above 0", remedy)

    def choices(self) -> None:
        count = self.values.get("num_nextn_predict_layers")
        if not is_int(count) or count not in (0, 1):
            remedy = "set 1 if the checkpoint stores an MTP layer, else 0"
            self.bad("num_nextn_predict_layers", "must be 0 or 1", remedy)
        if not isinstance(self.values.get("index_share_for_mtp_iteration"), bool):
            remedy = "write it as a boolean"
            self.bad("index_share_for_mtp_iteration", "must be true or false", remedy)
        if self.values.get("dtype") not in DTYPES:
            self.bad("dtype", "is not supported", f"use one of {', '.join(DTYPES)}")
        if not isinstance(self.values.get("quantization_config"), Fp8Quantization | None):
            self.bad("quantization_config", "has the wrong type", "give an Fp8Quantization or None")
        pattern = self.values.get("index_topk_pattern")
        if pattern is not None and (not isinstance(pattern, str) or set(pattern) - {"F", "S"}):
            remedy = "write e.g. 'FFFSSSF', or give indexer_types instead"
            self.bad("index_topk_pattern", "must be a string of F and S", remedy)

    def dense_count(self) -> None:
        field = "first_k_dense_replace"
        count, layers = self.values.get(field), self.sound("num_hidden_layers")
        kinds = self.values.get("mlp_layer_types")
        if count is None:
            if kinds is None or isinstance(kinds, tuple):
                remedy = "give it or mlp_layer_types (the published models have 3 dense layers)"
                self.bad(field, _LACKING, remedy)
        elif not is_int(count) or count < 0:
            remedy = "give the number of dense layers"
            self.bad(field, "must be a whole number of at least 0", remedy)
        elif layers is not None and count > layers:
            self.bad(field, f"is more than num_hidden_layers = {layers}", f"set at most {layers}")

    def layer_types(self, field: str, allowed: tuple[str, ...], *, given_by: str) -> None:
        kinds, layers = self.values.get(field), self.sound("num_hidden_layers")
        wanted = " or ".join(repr(kind) for kind in allowed)
        if kinds is None:
            # Nothing to add when the field it would follow from is itself the mistake.
            if layers is not None and given_by not in self.problems:
                self.bad(field, _LACKING, f"give {wanted} for each layer")
        elif not isinstance(kinds, tuple):
            self.bad(field, "must be a list with one entry per layer", f"use {wanted}")
        elif unknown := [kind for kind in kinds if kind not in allowed]:
            self.bad(field, f"holds the unknown entry {unknown[0]!r}", f"use only {wanted}")
        elif layers is not None and len(kinds) != layers:
            reason = f"has {len(kinds)} entries but num_hidden_layers = {layers}"
            self.bad(field, reason, "give one entry per layer or correct num_hidden_layers")

    def layer_order(self) -> None:
        field = "indexer_types"
        indexers, kinds = self.sound(field), self.sound("mlp_layer_types")
        if indexers and indexers[0] != "full":
            self.bad(field, "starts with a shared layer, with no earlier index set", "make it full")
        if kinds is None:
            return
        dense = [layer for layer, kind in enumerate(kinds) if kind == "dense"]
        if kinds != dense_first(len(dense), len(kinds)):
            late = [layer for layer in dense if "sparse" in kinds[:layer]]
            reason = f"has dense layers {late} after a sparse one"
            self.bad("mlp_layer_types", reason, "put the dense layers first")
        elif self.sound("first_k_dense_replace") not in (None, len(dense)):
            reason = f"contradicts mlp_layer_types, which has {len(dense)} dense layers"
            remedy = "correct one of the two, or leave one out of config.json"
            self.bad("first_k_dense_replace", reason, remedy)

    def relations(self) -> None:
        heads, kv_heads = self.sound("num_attention_heads"), self.sound("num_key_value_heads")
        if heads and kv_heads and heads != kv_heads:
            reason = f"differs from num_attention_heads = {heads}"
            self.bad("num_key_value_heads", reason, f"set it to {heads}")
        chosen, experts = self.sound("num_experts_per_tok"), self.sound("n_routed_experts")
        if chosen and experts and chosen > experts:
            reason = f"is more than n_routed_experts = {experts}"
            self.bad("num_experts_per_tok", reason, f"choose at most {experts}")
        rope, index_width = self.sound("qk_rope_head_dim"), self.sound("index_head_dim")
        if rope and rope % 2:
            reason = "is odd, but rotation works on pairs"
            self.bad("qk_rope_head_dim", reason, "use an even number")
        elif rope and index_width and rope > index_width:
            reason = f"is wider than index_head_dim = {index_width}, whose first part it rotates"
            self.bad("qk_rope_head_dim", reason, "make it at most index_head_dim")

    def tokens(self) -> None:
        vocab, pad = self.sound("vocab_size"), self.sound("pad_token_id")
        ids_of = {"eos_token_id": self.values.get("eos_token_id")}
        if pad is not None:
            ids_of["pad_token_id"] = (pad,)
        for field, ids in ids_of.items():
            if not isinstance(ids, tuple) or not all(is_int(i) and i >= 0 for i in ids):
                remedy = "use whole numbers of at least 0, or null"
                self.bad(field, "must be a token id or a list of them", remedy)
            elif vocab and (outside := [i for i in ids if i >= vocab]):
                reason = f"{outside[0]} is outside the vocabulary, 0 to {vocab - 1}"
                self.bad(field, reason, "correct or remove it, or correct vocab_size")


def _finite_above_zero(value: int | float) -> bool:
    try:
        return math.isfinite(value) and value > 0
    except OverflowError:  # a whole number too large for a float
        return False
