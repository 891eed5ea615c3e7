"""The file-size budget."""

from pathlib import Path

from scripts.check_file_sizes import faults


def test_a_long_file_needs_a_reason_and_a_reason_needs_a_long_file(tmp_path: Path):
    (tmp_path / "rl").mkdir()
    (tmp_path / "rl/long.py").write_text("x = 1\n" * 601)
    (tmp_path / "rl/fits.py").write_text("x = 1\n" * 600)
    assert [x.split(":")[0] for x in faults(tmp_path, {})] == ["rl/long.py"]
    assert faults(tmp_path, {"rl/long.py": "a table"}) == []
    surplus = faults(tmp_path, {"rl/long.py": "a table", "rl/fits.py": "none"})
    assert [x.split(":")[0] for x in surplus] == ["rl/fits.py"]
