"""Puts the seconds of the whole demo (model, data, cold start, training) into the run's summary.json."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from luspo_megatron.report.records import write_json


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    args = parser.parse_args()
    path = args.run_dir / "summary.json"
    summary = json.loads(path.read_text())
    summary["training_seconds"], summary["seconds"] = summary["seconds"], args.seconds
    write_json(path, summary)
    print(f"whole demo: {args.seconds / 60:.1f} minutes; report: {args.run_dir / 'report.html'}")


if __name__ == "__main__":
    main()
