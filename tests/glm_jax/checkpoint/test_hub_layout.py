"""The map between leaves and hub tensors: complete, one to one, and right."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from glm_jax.checkpoint import hub_layout
from glm_jax.checkpoint.boxes import LeafBuffers
from glm_jax.checkpoint.hub import load_hub
from glm_jax.checkpoint.hub_layout import hub_tensors, transformers_name
from glm_jax.checkpoint.hub_save import to_hub, transformers_norms
from glm_jax.config import GlmConfig
from glm_jax.errors import GlmError
from glm_jax.model import GlmModel
from glm_jax.params import Buffer, leaves
from glm_jax.presets import preset
from tests.glm_jax.checkpoint.helpers import FIXTURE, arrays_of, random_model, read_tensors, short


@pytest.mark.parametrize("name", ["tiny", "small"])
def test_every_value_of_every_leaf_and_tensor_is_mapped_exactly_once(name: str) -> None:
    cfg = preset(name)
    shapes = {path: leaf.shape for path, leaf in leaves(GlmModel.abstract(cfg))}
    in_leaf = {path: np.zeros(shape, int) for path, shape in shapes.items()}
    for tensor in hub_tensors(cfg):
        in_tensor = np.zeros(tensor.shape, int)
        for piece in tensor.pieces:
            in_leaf[piece.leaf][tuple(slice(*span) for span in piece.box)] += 1
            in_tensor.reshape(piece.view)[tuple(slice(*span) for span in piece.window)] += 1
        assert (in_tensor == 1).all(), tensor.name
    for path, count in in_leaf.items():
        assert (count == 1).all(), path


def test_glm_5_2_has_the_published_number_of_values() -> None:
    counted = [np.prod(t.shape) for t in hub_tensors(preset("glm-5.2")) if t.kind != "bias"]
    assert sum(counted) == 753_329_921_024


def test_names_and_shapes_are_those_of_the_reference_checkpoint() -> None:
    found = {name: array.shape for name, array in read_tensors(FIXTURE).items()}
    assert {t.name: t.shape for t in hub_tensors(GlmConfig.from_json(FIXTURE))} == found


def expected_leaves(cfg: GlmConfig, hub: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Some leaves of the fixture, written out by hand: layer 4 is the second of segment 1."""
    n, p, u = cfg.num_attention_heads, cfg.qk_nope_head_dim, cfg.v_head_dim
    at = hub.__getitem__
    layer, mtp = "model.layers.4.", "model.layers.8."
    kv_b = at(f"{layer}self_attn.kv_b_proj.weight").reshape(n, p + u, -1)
    experts = [f"{layer}mlp.experts.{e}." for e in range(cfg.n_routed_experts)]
    gate = np.stack([at(f"{expert}gate_proj.weight").T for expert in experts])
    up = np.stack([at(f"{expert}up_proj.weight").T for expert in experts])
    dense = "model.layers.1.mlp."
    gate_up = [at(f"{dense}{half}_proj.weight").T for half in ("gate", "up")]
    indexer = "model.layers.2.self_attn.indexer."
    eh = at(f"{mtp}eh_proj.weight")
    q_b = at(f"{layer}self_attn.q_b_proj.weight")
    return {
        "embed": at("model.embed_tokens.weight"),
        "lm_head": at("lm_head.weight").T,
        "segments.1.blocks.0.attention.k_up": kv_b[:, :p],
        "segments.1.blocks.0.attention.v_up": kv_b[:, p:].transpose(0, 2, 1),
        "segments.1.blocks.0.attention.q_b": q_b.reshape(n, -1, q_b.shape[1]).transpose(2, 0, 1),
        "segments.1.blocks.0.attention.o": at(f"{layer}self_attn.o_proj.weight").T.reshape(
            n, u, -1
        ),
        "segments.1.blocks.0.feed_forward.gate_up": np.stack([gate, up], axis=2),
        "segments.1.blocks.0.feed_forward.router": at(f"{layer}mlp.gate.weight").T,
        "segments.0.blocks.0.feed_forward.gate_up": np.stack(gate_up, axis=1),
        "segments.0.blocks.0.indexer.k_norm_bias": at(f"{indexer}k_norm.bias"),
        "segments.0.blocks.0.indexer.head_weight": at(f"{indexer}weights_proj.weight").T,
        "mtp.join": np.stack([eh[:, : cfg.hidden_size].T, eh[:, cfg.hidden_size :].T]),
        "mtp.norm": at(f"{mtp}shared_head.norm.weight"),
    }


REPEAT = {"segments.0": {"indexer": 2, "feed_forward": 1}, "segments.1": {}}


def wrong_leaves() -> list[str]:
    """Leaves of the loaded fixture that differ from those written out by hand."""
    model = load_hub(FIXTURE)
    found, wrong = arrays_of(model), []
    for path, expected in expected_leaves(model.cfg, read_tensors(FIXTURE)).items():
        value = np.asarray(found[path])
        if path.startswith("segments."):
            value = value[REPEAT[path[:10]].get(path.split(".")[4], 1)]
        if not np.array_equal(value, expected):
            wrong.append(path)
    return wrong


def test_leaves_hold_the_right_part_of_the_reference_checkpoint() -> None:
    assert wrong_leaves() == []


def test_swapping_gate_and_up_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = hub_layout._Mapper.tensor

    def swapped(self, rule, name, prefix, at):
        return tensor(self, rule, name, prefix, {**at, "g": 1 - at["g"]})

    monkeypatch.setattr(hub_layout._Mapper, "tensor", swapped)
    assert wrong_leaves() == [
        "segments.1.blocks.0.feed_forward.gate_up",
        "segments.0.blocks.0.feed_forward.gate_up",
    ]


def test_swapping_key_and_value_halves_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_layout, "_PART_OF", {"P": ("W", "U"), "U": ("W", "")})
    assert wrong_leaves() == [
        "segments.1.blocks.0.attention.k_up",
        "segments.1.blocks.0.attention.v_up",
    ]


def test_to_hub_gives_back_every_tensor_of_the_file() -> None:
    stored = read_tensors(FIXTURE)
    yielded = dict(to_hub(load_hub(FIXTURE)))
    assert yielded.keys() == stored.keys()
    for name, array in yielded.items():
        assert array.dtype == stored[name].dtype and np.array_equal(array, stored[name]), name


def test_to_hub_of_a_gradient_leaves_out_only_the_buffers() -> None:
    model = random_model(short())
    gradient = nnx.state(model, nnx.Param)
    everything, given = dict(to_hub(model)), dict(to_hub(gradient, model.cfg))
    assert everything.keys() - given.keys() == {
        f"model.layers.{i}.mlp.gate.e_score_correction_bias" for i in (1, 2, 3)
    }
    assert all(np.array_equal(given[name], everything[name]) for name in given)
    with pytest.raises(GlmError, match=r"embed_tokens\.weight: the tree has no leaf embed"):
        dict(to_hub(nnx.state(model, Buffer), model.cfg))
    with pytest.raises(GlmError, match=r"pass cfg=model\.cfg"):
        dict(to_hub(gradient))


def test_norms_by_transformers_name_fuse_experts_and_leave_the_mtp_layer_out() -> None:
    model = load_hub(FIXTURE)
    squares: dict[str, float] = {}
    for name, array in read_tensors(FIXTURE).items():
        if ".layers.8." not in name and not name.endswith("e_score_correction_bias"):
            square = float(np.sum(array.astype(np.float64) ** 2))
            name = transformers_name(name)
            squares[name] = squares.get(name, 0.0) + square
    norms = transformers_norms(nnx.state(model, nnx.Param), model.cfg)
    assert norms.keys() == squares.keys()
    assert "model.layers.3.mlp.experts.gate_up_proj" in norms
    for name in norms:
        assert norms[name] == pytest.approx(squares[name] ** 0.5, rel=1e-6), name


def test_norms_cover_every_parameter_of_the_reference() -> None:
    with np.load(FIXTURE / "reference.npz") as reference:
        wanted = {key.removeprefix("gradnorm.") for key in reference if "gradnorm." in key}
    model = load_hub(FIXTURE)
    assert wanted and wanted <= transformers_norms(model).keys()


def test_a_strip_at_a_time_fills_a_leaf_completely(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("glm_jax.checkpoint.boxes.STRIP_BYTES", 1000)
    monkeypatch.setattr("glm_jax.checkpoint.boxes.SMALL_BYTES", 0)
    tensor = next(t for t in hub_tensors(short()) if t.name.endswith("layers.1.mlp.gate.weight"))
    piece = dataclasses.replace(tensor.pieces[0], box=((0, 1), (0, 64), (0, 8)))
    place = jnp.zeros(1).sharding
    buffers = LeafBuffers((1, 64, 8), jnp.float32, place)
    values = np.arange(8 * 64, dtype=np.float32).reshape(8, 64)
    buffers.write(piece, values)
    assert np.array_equal(buffers.finish()[0], values.T)
