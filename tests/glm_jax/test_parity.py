"""The model agrees with the reference implementation, and the check of it misses nothing."""

import dataclasses
import json
import sys
from pathlib import Path

import numpy as np
import pytest

from glm_jax.config import GlmConfig
from glm_jax.errors import GlmError
from glm_jax.model import attention
from glm_jax.parity import ParityReport, Reference, check_parity, passes
from glm_jax.parity.measure import boundary_gap, compare, max_abs, relative, rows_that_differ
from glm_jax.parity.names import PARTS, Part, collapse, expected_shapes
from glm_jax.parity.report import MAX_ABS, Form
from rl.cli import main as cli

DATA = Path(__file__).resolve().parents[1] / "data"
GLM5, GLM52 = DATA / "glm5_tiny", DATA / "glm52_tiny"

ISSUE_KEYS = {
    "max_abs_logit_diff",
    "index_sets_equal",
    "routes_equal",
    "decode_max_abs",
    "mtp_max_abs",
    "grad_norm_max_rel",
    "ok",
}


def run(monkeypatch: pytest.MonkeyPatch, *args: object) -> int | str | None:
    """Runs `glm-jax check parity` in this process and returns its exit status."""
    monkeypatch.setattr(sys, "argv", ["glm-jax", "check", "parity", *map(str, args)])
    with pytest.raises(SystemExit) as leaving:
        cli.main()
    return leaving.value.code


def arrays(directory: Path) -> dict[str, np.ndarray]:
    with np.load(directory / "reference.npz") as archive:
        return dict(archive)


def write(directory: Path, contents: dict[str, np.ndarray], meta: object = None) -> Path:
    """A reference file, and the meta.json beside it if one is given."""
    np.savez(directory / "reference.npz", **contents)
    if meta is not None:
        (directory / "meta.json").write_text(json.dumps(meta))
    return directory / "reference.npz"


def report_of(directory: Path, *runs: tuple[tuple[Part, ...], tuple[Form, ...]]) -> ParityReport:
    """Several runs in one report. Compiling takes the time, so not every form does everything."""
    file = directory / "reference.npz"
    reports = [check_parity(directory, file, parts=parts, forms=forms) for parts, forms in runs]
    every = tuple(x for report in reports for x in report.comparisons)
    absent = tuple(name for report in reports for name in report.absent)
    return dataclasses.replace(reports[0], comparisons=every, absent=absent)


THROUGH_THE_CACHE = (("prefill", "mtp", "decode"), ("pinned",))


@pytest.fixture(scope="module")
def glm5() -> ParityReport:
    return report_of(GLM5, (PARTS, ("masked",)), (("prefill",), ("gathered",)), THROUGH_THE_CACHE)


@pytest.fixture(scope="module")
def glm52() -> ParityReport:
    return report_of(GLM52, (PARTS, ("gathered",)), (("prefill",), ("masked",)), THROUGH_THE_CACHE)


@pytest.mark.parametrize("directory, eps", [(GLM5, 1e-5), (GLM52, 1e-6)], ids=["glm5", "glm52"])
def test_fixture_matches_the_reference(request, directory, eps):
    report = request.getfixturevalue(directory.name.removesuffix("_tiny"))
    assert report.ok and not report.failures and not report.absent
    assert (report.latent_norm_eps, report.latent_norm_eps_from) == (eps, "meta.json")
    # Far inside the bounds, so that a small mistake shows before it becomes a large one.
    assert report.worst.severity < 0.2
    every = arrays(directory).keys() - {"input_ids"}
    assert {x.name for x in report.comparisons} == every
    # Pinned numerics compute no index scores as a whole, and no gradients yet.
    others = {x for x in every if ".idx_" in x or x.startswith("grad") or x == "loss"}
    assert {x.name for x in report.comparisons if x.form == "pinned"} == every - others
    pinned = [x for x in report.comparisons if x.form == "pinned"]
    assert {x.group for x in pinned} >= {"index_sets", "routes", "decode", "mtp", "logits"}


@pytest.mark.parametrize("directory", [GLM5, GLM52], ids=lambda x: x.name)
def test_command_prints_the_keys_and_leaves_with_0(monkeypatch, capsys, tmp_path, directory):
    chosen = ("input_ids", "logits", "selected", "router_experts")
    whole = {k: v for k, v in arrays(directory).items() if k.rpartition(".")[2] in chosen}
    whole = {k: v for k, v in whole.items() if not k.startswith("mtp")}
    meta = json.loads((directory / "meta.json").read_text())
    reference = write(tmp_path, whole, meta)
    assert run(monkeypatch, "--checkpoint", directory, "--reference", reference, "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report.keys() >= ISSUE_KEYS
    assert report["ok"] is report["index_sets_equal"] is report["routes_equal"] is True
    assert 0 < report["max_abs_logit_diff"] < MAX_ABS
    assert report["compared"] == len(whole) - 1
    assert report["failures"] == report["not_finite"] == []
    assert report["forms"] == ["masked", "gathered", "pinned"]


@pytest.fixture
def logits_only(tmp_path) -> Path:
    """A reference without gradients, layers, draft layer and meta.json: the quickest to check."""
    whole = arrays(GLM5)
    return write(tmp_path, {name: whole[name] for name in ("input_ids", "logits")})


def test_eps_of_the_command_goes_before_that_of_the_files(monkeypatch, capsys, tmp_path):
    whole = arrays(GLM52)
    logits = {name: whole[name] for name in ("input_ids", "logits")}
    reference = write(tmp_path, logits, {"latent_norm_eps": 1e-5})
    args = ["--checkpoint", GLM52, "--reference", reference, "--latent-norm-eps", "1e-6", "--json"]
    assert run(monkeypatch, *args) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["latent_norm_eps"], report["latent_norm_eps_from"]) == (1e-6, "option")


def test_difference_is_exit_status_1(monkeypatch, capsys, tmp_path):
    whole = arrays(GLM5)
    wrong = {"input_ids": whole["input_ids"], "logits": whole["logits"] + np.float32(1)}
    args = ["--checkpoint", GLM5, "--reference", write(tmp_path, wrong)]
    assert run(monkeypatch, *args, "--json") == 1
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is False and report["max_abs_logit_diff"] == pytest.approx(1, abs=1e-3)
    assert report["failures"] == ["logits (gathered)", "logits (masked)", "logits (pinned)"]
    assert run(monkeypatch, *args) == 1
    assert "parity does not hold" in capsys.readouterr().out


def test_what_the_reference_lacks_is_stated(monkeypatch, capsys, logits_only):
    args = ["--checkpoint", GLM5, "--reference", logits_only]
    assert run(monkeypatch, *args) == 0
    table = capsys.readouterr().out
    assert "parity holds" in table and "(from config.json)" in table
    assert table.count("not in the reference") == 9
    for name in ("gradnorm.*", "mtp.*", "layer0.*", "logits_decode"):
        assert name in table


def test_absent_arrays_are_null_in_json(logits_only):
    report = check_parity(GLM5, logits_only, forms=("masked",)).to_json()
    assert report["ok"] is True and report["compared"] == 1
    for key in ISSUE_KEYS - {"ok", "max_abs_logit_diff"}:
        assert report[key] is None


@pytest.mark.parametrize(
    "name, form",
    [
        ("logits", "masked"),
        ("layer1.idx_scores", "masked"),
        ("layer2.selected", "masked"),
        ("layer2.selected", "pinned"),
    ],
)
def test_one_wrong_number_is_found(tmp_path, name, form):
    whole = {k: v for k, v in arrays(GLM5).items() if k in ("input_ids", "logits") or "layer" in k}
    wrong = whole[name].copy()
    wrong[1, 20, 3] = ~wrong[1, 20, 3] if wrong.dtype == bool else wrong[1, 20, 3] + 6e-4
    path = write(tmp_path, whole | {name: wrong}, {"latent_norm_eps": 1e-5})
    report = check_parity(GLM5, path, parts=("prefill",), forms=(form,))
    assert [x.name for x in report.failures] == [name]
    assert not report.ok and report.worst.name == name


def test_nan_is_never_ok(tmp_path):
    whole = arrays(GLM5)
    logits = whole["logits"].copy()
    logits[0, 0, 0] = np.nan
    path = write(tmp_path, {"input_ids": whole["input_ids"], "logits": logits})
    report = check_parity(GLM5, path, forms=("masked",)).to_json()
    assert report["ok"] is False
    assert report["max_abs_logit_diff"] is None
    assert report["not_finite"] == report["failures"] == ["logits (masked)"]
    json.dumps(report, allow_nan=False)


def test_reference_of_another_checkpoint_is_one_error_and_status_2(monkeypatch, capsys):
    assert (
        run(monkeypatch, "--checkpoint", GLM5, "--reference", GLM52 / "reference.npz", "--json")
        == 2
    )
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and "does not belong to the checkpoint" in err
    for text in (
        "logits: shape (2, 48, 160)",
        "layer7.out: the checkpoint has nothing",
        "input_ids",
    ):
        assert text in err


@pytest.mark.parametrize(
    "change, named",
    [
        (
            {"layer9.out": np.zeros((2, 32, 32), np.float32)},
            "layer9.out: the checkpoint has nothing",
        ),
        ({"layer0.router_logits": np.zeros((2, 32, 8), np.float32)}, "layer0.router_logits"),
        ({"logits": np.zeros((2, 32, 71), np.float32)}, r"logits: shape \(2, 32, 71\)"),
        ({"layer0.selected": np.zeros((2, 32, 32), np.float32)}, "layer0.selected: dtype float32"),
        ({"input_ids": np.full((2, 32), 72)}, "input_ids: 72 is outside the vocabulary of 72"),
        (
            {"layer0.out": np.zeros((2, 32, 32), np.float32)},
            "layer1, layer2, layer3, layer4: in the",
        ),
    ],
)
def test_array_that_cannot_belong_is_named(tmp_path, change, named):
    base = {"input_ids": np.zeros((2, 32), np.int32), "logits": np.zeros((2, 32, 72), np.float32)}
    with pytest.raises(GlmError, match=named):
        check_parity(GLM5, write(tmp_path, base | change))


def test_gradient_norm_of_an_unknown_parameter_is_named(tmp_path):
    whole = arrays(GLM5)
    contents = {name: whole[name] for name in ("input_ids", "logits", "loss")}
    contents["gradnorm.model.layers.0.self_attn.bias"] = np.float32(0)
    path = write(tmp_path, contents)
    with pytest.raises(
        GlmError, match=r"nothing compares to gradnorm.model.layers.0.self_attn.bias"
    ):
        check_parity(GLM5, path, parts=("gradients",), forms=("masked",))


def test_gradients_in_the_pinned_form_alone_are_an_error(tmp_path):
    whole = arrays(GLM5)
    path = write(tmp_path, {name: whole[name] for name in ("input_ids", "logits", "loss")})
    with pytest.raises(GlmError, match="gradients are computed in native arithmetic; add masked"):
        check_parity(GLM5, path, forms=("pinned",))


@pytest.mark.parametrize(
    "meta, named",
    [
        ({"latent_norm_eps": "1e-6"}, "latent_norm_eps: '1e-6'"),
        ({"latent_norm_eps": 0}, "latent_norm_eps: 0"),
        ({"options": {"prefill": 32}}, "options.prefill: 32"),
        ({"options": {"prefill": 1.5}}, "options.prefill: 1.5"),
    ],
)
def test_meta_that_cannot_be_used_is_named(tmp_path, meta, named):
    contents = {"input_ids": np.zeros((1, 32), np.int32), "logits": np.zeros(1)}
    with pytest.raises(GlmError, match=named):
        Reference.load(write(tmp_path, contents, meta))


def test_unusable_reference_file_is_named(tmp_path):
    with pytest.raises(GlmError, match="no such file"):
        Reference.load(tmp_path / "reference.npz")
    (tmp_path / "text.npz").write_text("text")
    with pytest.raises(GlmError, match=r"text.npz: is no .npz file; give the reference.npz"):
        Reference.load(tmp_path / "text.npz")
    (tmp_path / "cut.npz").write_bytes(b"PK\x03\x04 cut")
    with pytest.raises(GlmError, match=r"cut.npz: is not a readable .npz"):
        Reference.load(tmp_path / "cut.npz")
    with pytest.raises(GlmError, match=r"is a directory; give the reference\.npz in it"):
        Reference.load(tmp_path)
    np.save(tmp_path / "one.npy", np.zeros(3))
    with pytest.raises(GlmError, match="one array"):
        Reference.load(tmp_path / "one.npy")
    with pytest.raises(GlmError, match="no array 'input_ids'"):
        Reference.load(write(tmp_path, {"logits": np.zeros(3)}))
    with pytest.raises(GlmError, match="input_ids is float64"):
        Reference.load(write(tmp_path, {"logits": np.zeros(3), "input_ids": np.zeros((2, 4))}))


def test_a_piece_replaced_between_two_checks_is_traced_anew(monkeypatch, logits_only):
    assert check_parity(GLM5, logits_only, forms=("masked",)).ok
    monkeypatch.setattr(attention, "rope", lambda x, cos, sin: x)
    assert not check_parity(GLM5, logits_only, forms=("masked",)).ok


def test_missing_checkpoint_is_status_2(monkeypatch, capsys, tmp_path, logits_only):
    args = ["--checkpoint", tmp_path / "nowhere", "--reference", logits_only]
    assert run(monkeypatch, *args) == 2
    assert "nowhere: no such" in capsys.readouterr().err


def test_max_abs_wants_infinities_in_the_same_places():
    x = np.array([1.0, -np.inf])
    assert max_abs(x, x) == 0
    assert max_abs(np.array([1.25, -np.inf]), x) == 0.25
    assert max_abs(np.array([1.0, 0.0]), x) == np.inf
    assert max_abs(np.array([1.0, np.inf]), x) == np.inf
    assert max_abs(np.array([-np.inf, -np.inf]), x) == np.inf
    assert np.isnan(max_abs(np.array([np.nan, -np.inf]), x))


def test_relative_against_exact_zeros_passes_only_zeros():
    assert relative(np.zeros(2), np.zeros(2)) == 0
    assert relative(np.ones(2), np.zeros(2)) == np.inf
    assert relative(np.array([3.0, 4.5]), np.array([3.0, 4.0])) == pytest.approx(0.1)
    assert not compare("loss", "masked", np.array(np.nan), np.array(1.0)).ok


def test_boundary_gap_is_infinite_where_every_key_is_selected():
    scores = np.array([[[4.0, -np.inf, -np.inf], [1.0, 4.0, -np.inf], [3.0, -4.0, 1.0]]])
    assert boundary_gap(scores, 2).tolist() == [[np.inf, np.inf, 1.25]]
    assert np.isinf(boundary_gap(scores, 3)).all()


def test_a_list_of_keys_that_is_no_selection_is_a_row_of_false():
    n_keys = 6  # of a cache for more than the prompt's three tokens
    sound = np.asarray([[[0, 6], [0, 1], [0, 2]]])
    assert passes._as_mask(sound, 2, n_keys).tolist() == [
        [[True, False, False], [True, True, False], [True, False, True]]
    ]
    for row, wrong in ((0, [6, 6]), (0, [0, 3]), (1, [1, 6]), (1, [0, 5]), (2, [1, 1])):
        lists = sound.copy()
        lists[0, row] = wrong
        mask = passes._as_mask(lists, 2, n_keys)
        assert rows_that_differ(mask, passes._as_mask(sound, 2, n_keys)) == 1


def test_expected_names_are_those_of_the_reference_file():
    for directory in (GLM5, GLM52):
        shapes = expected_shapes(
            GlmConfig.from_json(directory), *arrays(directory)["input_ids"].shape
        )
        known = {k: v for k, v in arrays(directory).items() if not k.startswith("gradnorm.")}
        assert {k: v.shape for k, v in known.items() if k != "input_ids"} == shapes


def test_a_whole_family_is_one_entry():
    assert collapse({"mtp.a", "mtp.b", "x.a", "y"}, {"mtp.a", "mtp.b", "x.a", "x.b", "y"}) == (
        "mtp.*",
        "x.a",
        "y",
    )
