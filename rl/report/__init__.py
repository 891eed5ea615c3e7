"""Reports of runs: plots, and one self-contained HTML page."""

from rl.report.write import write_comparison, write_report

__all__ = ["write_comparison", "write_report"]
