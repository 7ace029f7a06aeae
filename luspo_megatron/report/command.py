"""`luspo report`: write the report of a run, compare several, or show either live."""

from __future__ import annotations

from pathlib import Path

from luspo_megatron.config_tools import ReportConfig
from luspo_megatron.report.compare import read_runs, write_comparison
from luspo_megatron.report.html import write_report
from luspo_megatron.report.serve import serve

COMPARISON_FILE = "comparison.html"


def main(config: ReportConfig) -> int:
    if config.serve:
        return serve(config.runs, config.port, config.refresh, lambda text: print(text, flush=True))
    runs = read_runs(config.runs)
    if len(runs) == 1:
        path = write_report(runs[0].folder, config.out)
    else:
        path = write_comparison(runs, Path(config.out or runs[0].folder.resolve().parent / COMPARISON_FILE))
    print(path)
    return 0
