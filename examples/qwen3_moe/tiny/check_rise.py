"""Exit code 1 unless the demo raised the pass rate: lower 95% bound of the rise above so many points."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--points", type=float, default=8.0)
    args = parser.parse_args()
    summary = json.loads((args.run_dir / "summary.json").read_text())
    low = 100 * summary["difference"]["low"]
    enough = low > args.points
    print(f"{args.run_dir}: pass rate {summary['pass_rate_before']:.3f} -> {summary['pass_rate_after']:.3f}, lower 95% "
          f"bound of the rise {low:+.1f} points, {'above' if enough else 'NOT above'} {args.points:g}")
    return 0 if enough else 1


if __name__ == "__main__":
    sys.exit(main())
