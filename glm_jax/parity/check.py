"""`check_parity`: load, run, compare, and leave no array of the reference out."""

from collections.abc import Callable, Iterator
from pathlib import Path

from glm_jax.checkpoint.hub import load_hub
from glm_jax.config import GlmConfig
from glm_jax.errors import GlmError
from glm_jax.model import GlmModel
from glm_jax.parity import passes
from glm_jax.parity.measure import compare
from glm_jax.parity.names import PARTS, Part, collapse, expected_shapes, part_of
from glm_jax.parity.passes import Arrays
from glm_jax.parity.reference import Reference
from glm_jax.parity.report import FORMS, Comparison, EpsSource, Form, ParityReport

Progress = Callable[[str], None]

SCORES = (".idx_scores", ".idx_gap")
"""What the pinned form does not compute as a whole: it goes through the keys by page."""


def check_parity(
    checkpoint_dir: str | Path,
    reference_npz: str | Path,
    *,
    latent_norm_eps: float | None = None,
    parts: tuple[Part, ...] = PARTS,
    forms: tuple[Form, ...] = FORMS,
    progress: Progress = lambda _: None,
) -> ParityReport:
    """Loads a checkpoint in fp32, runs it, and compares it with a reference file.

    Bounds: 5e-4 on every value and logit, 1e-4 relative on the loss and the gradients; selected
    keys and routes are equal. Values are compared in every form; gradients in the native ones.

    Args:
        checkpoint_dir: a checkpoint in the hub's layout.
        reference_npz: the arrays; a `meta.json` beside them may say how they were made.
        latent_norm_eps: eps of the latent norms. Default: what `meta.json` says, else the config.
        parts: what to run. Arrays of other parts are not compared; the report says so.
        forms: the forms to run. Pinned numerics keep no index scores: alone, they leave those of
            the reference uncompared.
        progress: called with what is being done.

    Raises:
        GlmError: an unreadable checkpoint or reference, a reference of another checkpoint, or one
            with an array that nothing compares to; gradients without a native form.
    """
    reference = Reference.load(reference_npz)
    cfg = GlmConfig.from_json(checkpoint_dir)
    reference.check_fits(cfg)
    source: EpsSource
    if latent_norm_eps is not None:
        eps, source = latent_norm_eps, "option"
    elif reference.latent_norm_eps is not None:
        eps, source = reference.latent_norm_eps, "meta.json"
    else:
        eps, source = cfg.latent_norm_eps, "config.json"
    cfg = cfg.with_overrides(latent_norm_eps=eps)
    progress("loading the checkpoint")
    model = load_hub(checkpoint_dir, cfg, dtype="float32")
    return check_model(
        model,
        reference,
        latent_norm_eps_from=source,
        parts=parts,
        forms=forms,
        progress=progress,
    )


def check_model(
    model: GlmModel,
    reference: Reference,
    *,
    latent_norm_eps_from: EpsSource = "config.json",
    parts: tuple[Part, ...] = PARTS,
    forms: tuple[Form, ...] = FORMS,
    progress: Progress = lambda _: None,
) -> ParityReport:
    """As `check_parity`, for a loaded fp32 model; its config says which eps is used.

    Raises:
        GlmError: the reference does not fit the model, or nothing compares to one of its arrays;
            gradients without a native form.
    """
    reference.check_fits(model.cfg)
    wanted = {name: x for name, x in reference.arrays.items() if part_of(name) in parts}
    if set(forms) == {"pinned"}:
        wanted = {name: x for name, x in wanted.items() if not name.endswith(SCORES)}
    comparisons: list[Comparison] = []
    shapes = expected_shapes(model.cfg, *reference.ids_BS.shape)
    order = {name: place for place, name in enumerate(shapes)}
    possible = {*shapes, "gradnorm.*"}
    for form, ours in _run(model, reference, parts, forms, progress):
        # No gradient reaches the indexer: the reference does not list it, and ours is zero.
        possible |= {x for x in ours if x.startswith("gradnorm.") and ours[x] != 0}
        for name in ours.keys() & wanted.keys():
            comparisons.append(compare(name, form, ours[name], wanted[name]))
    if unmatched := sorted(wanted.keys() - {x.name for x in comparisons}):
        raise GlmError(
            f"{reference.path}: nothing compares to {', '.join(unmatched)}; remove the arrays, or "
            "give the checkpoint they were made from"
        )

    def place(x: Comparison) -> tuple[int, str, str]:
        return order.get(x.name, len(order)), x.name, x.form

    return ParityReport(
        comparisons=tuple(sorted(comparisons, key=place)),
        latent_norm_eps=model.cfg.latent_norm_eps,
        latent_norm_eps_from=latent_norm_eps_from,
        prefill=reference.prefill,
        absent=_absent(possible, reference, parts),
        parts=parts,
        forms=forms,
    )


def _run(
    model: GlmModel,
    reference: Reference,
    parts: tuple[Part, ...],
    forms: tuple[Form, ...],
    progress: Progress,
) -> Iterator[tuple[Form, Arrays]]:
    """Our arrays, one set a run. Runs nothing that no array of the reference asks for."""
    asked = {part_of(name) for name in reference.arrays} & set(parts)
    if "gradients" in asked and set(forms) <= {"pinned"}:
        raise GlmError(
            "parts: gradients are computed in native arithmetic; add masked or gathered to the "
            "forms, or leave them out"
        )
    for form in forms:
        if asked & {"prefill", "mtp"}:
            progress(f"prefill, {form}")
            values = passes.prefill(model, reference, form)
            yield form, values
            if "mtp" in asked:
                progress(f"draft layer, {form}")
                yield form, passes.mtp(model, reference, form, values["final_norm"])
        if "gradients" in asked and form != "pinned":
            progress(f"gradients, {form}")
            yield form, passes.gradients(model, reference, form)
    if "decode" in asked:
        progress("decoding")
        yield from passes.decode(model, reference, forms)


def _absent(possible: set[str], reference: Reference, parts: tuple[Part, ...]) -> tuple[str, ...]:
    """What the reference lacks of the arrays we can compute."""
    possible = {name for name in possible if part_of(name) in parts}
    if any(name.startswith("gradnorm.") for name in reference.arrays):
        possible.discard("gradnorm.*")
    return collapse(possible - reference.arrays.keys(), possible)
