"""The README is executed as written."""

from pathlib import Path

import pytest

from scripts import check_readme


def write(path: Path, *blocks: str) -> Path:
    path.write_text("\n\n".join(blocks) + "\n")
    return path


def test_blocks_run_in_order_until_one_fails(tmp_path: Path):
    log = tmp_path / "log"
    readme = write(
        tmp_path / "README.md",
        f"```bash\necho bash >> {log}\n```",
        f"```python\nopen({str(log)!r}, 'a').write('python')\n```",
        "```bash\nfalse | true\n```",
        f"```bash\necho too far >> {log}\n```",
    )
    assert not check_readme.run_blocks(readme)
    assert log.read_text() == "bash\npython"


def test_only_commented_or_foreign_blocks_are_skipped(tmp_path: Path):
    readme = write(
        tmp_path / "README.md",
        "<!-- no-run: needs a TPU -->\n```bash\nfalse\n```",
        "<!-- test-command -->\n```bash\nfalse\n```",
        "```text\nfalse\n```",
    )
    assert check_readme.run_blocks(readme)
    assert not check_readme.run_blocks(
        write(readme, "<!-- no-run: x -->\ntext\n```bash\nfalse\n```")
    )


def test_no_run_without_a_reason_is_refused():
    with pytest.raises(ValueError, match="line 1: write the reason"):
        list(check_readme.code_blocks("<!-- no-run -->\n```bash\nfalse\n```"))


def test_unclosed_block_is_refused():
    with pytest.raises(ValueError, match="line 2: the block is not closed"):
        list(check_readme.code_blocks("text\n```bash\nfalse"))


def test_the_readme_has_exactly_one_test_command():
    assert check_readme.test_command(check_readme.README.read_text()).startswith("uv run")
    with pytest.raises(ValueError, match="0 blocks are marked"):
        check_readme.test_command("```bash\ntrue\n```")
