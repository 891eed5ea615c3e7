"""Reports: complete, self-contained, and honest about what was not computed."""

import json
import re

import pytest

from glm_jax.errors import GlmError
from rl.report import write_comparison, write_report
from rl.report.plots import PLOTS, draw
from rl.report.runs import read_run
from rl.run_directory import METRICS, SUMMARY
from tests.rl.report.fakes import write_run


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    run = write_run(tmp_path_factory.mktemp("runs") / "countdown")
    return write_report(run)


def test_the_page_holds_curves_steps_samples_digests_and_recipe(report):
    page = report.read_text()
    for title in (
        *("Reward", "KL estimates", "Clipped share", "Entropy", "Length of answers"),
        *("Time of a step", "Sample completions", "Digests", "Recipe", "unequal tokens"),
    ):
        assert title in page, title
    assert page.count("<figure>") == 10 == len(list(report.parent.glob("plots/*.png")))
    assert "rl.learning_rate" in page and "00ff00ff00ff00ff" in page and "31.0% → 62.0%" in page
    for step in range(1, 26):
        assert f"{step:016x}" in page


def test_each_stage_of_a_step_has_its_seconds(report):
    page = report.read_text()
    cells = re.findall(r"<td[^>]*>([^<]*)", page[page.index("Seconds by stage") :])
    rows = {cells[i]: cells[i + 1 : i + 3] for i in range(0, 24, 3)}
    stages = ("generate", "encode", "transfer", "apply", "switch", "update", "whole step")
    assert tuple(rows)[:7] == stages
    assert rows["apply"] == ["0.025", "0.0010"] and rows["update"] == ["8.750", "0.3500"]


def test_a_first_step_that_compiles_does_not_hide_the_others(tmp_path):
    for slow, n_notes in ((1.0, 0), (20.0, 1)):
        run = write_run(tmp_path / str(slow))
        records = [json.loads(line) for line in (run / METRICS).read_text().splitlines()]
        records[0]["time/step"] = slow
        (run / METRICS).write_text("".join(json.dumps(record) + "\n" for record in records))
        plot = next(plot for plot in PLOTS if plot.name == "time")
        (axes,) = draw(plot, [read_run(run)]).axes
        assert axes.get_ylim()[1] < 1.5 and len(axes.texts) == n_notes


def test_the_page_needs_no_other_file(report):
    page = report.read_text()
    # Names of namespaces are no addresses that are fetched.
    page = re.sub(r'xmlns(:\w+)?="[^"]*"', "", page)
    assert not re.search(r"""(src|href)=["'](?!#)|url\((?!#)|@import|<script|<link""", page)


def test_samples_cannot_write_markup(report):
    page = report.read_text()
    assert "&lt;b&gt;3&amp;7&lt;/b&gt;" in page and "<b>3&7" not in page


def test_zero_is_said_to_be_exact_only_where_it_is(report, tmp_path):
    assert '<b class="good">0</b><span>unequal tokens' in report.read_text()
    native = write_report(write_run(tmp_path / "native", "native")).read_text()
    assert re.search(r'<b class="bad">[1-9][0-9,]*</b><span>unequal tokens', native)


def test_a_metric_that_was_not_computed_is_absent_not_zero(tmp_path):
    run = write_run(tmp_path / "run")
    records = [json.loads(line) for line in (run / METRICS).read_text().splitlines()]
    kept = [{k: v for k, v in r.items() if not k.startswith(("kl/", "ppo/"))} for r in records]
    (run / METRICS).write_text("".join(json.dumps(record) + "\n" for record in kept))
    page = write_report(run).read_text()
    for absent in ("KL estimates", "Clipped share", "<span>unequal tokens"):
        assert absent not in page
    assert "Reward" in page and not (run / "plots" / "kl.png").exists()


def test_a_run_that_was_cut_is_reported_as_such(tmp_path):
    run = write_run(tmp_path / "run", n_steps=2)
    (run / SUMMARY).unlink()
    with (run / METRICS).open("a") as lines:
        lines.write('{"step": 3, "re')
    assert len(read_run(run).steps) == 2
    assert "not complete" in write_report(run).read_text()


def test_the_same_run_gives_the_same_page(report):
    before = report.read_bytes()
    assert write_report(report.parent).read_bytes() == before


def test_two_runs_stand_side_by_side_and_differing_keys_are_named(report, tmp_path):
    native = write_run(tmp_path / "native", "native")
    page = write_comparison(report.parent, native, tmp_path / "both").read_text()
    assert "recipes differ in numerics.mode" in page
    assert page.count('<td class=" differs">') == 2 * 2  # numerics.mode and out, of two runs
    for name in ("Side by side", "Sample completions of native", "pinned", "unequal tokens"):
        assert name in page
    assert len(list((tmp_path / "both" / "plots").glob("*.png"))) == 10


def test_runs_of_one_name_are_told_apart(tmp_path):
    runs = [write_run(tmp_path / parent / "run", n_steps=3) for parent in "ab"]
    page = write_comparison(*runs, tmp_path / "both").read_text()
    assert "a/run" in page and "b/run" in page


def test_what_is_no_run_is_refused(tmp_path):
    with pytest.raises(GlmError, match=r"has no recipe\.toml; give the directory of a run"):
        write_report(tmp_path)
    run = write_run(tmp_path / "run", n_steps=1)
    (tmp_path / "file").write_text("")
    with pytest.raises(GlmError, match="cannot be written"):
        write_comparison(run, run, tmp_path / "file")
