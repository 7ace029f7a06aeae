"""Exit code 1 unless a finished run's export loads in transformers, differs from the start and still generates.

    python examples/smollm2/check_export.py --run-dir runs/smollm2/sums --model runs/smollm2-model
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

QUESTION = "What is the capital of France?"
EXPECTED = "Paris"


def generate(folder: Path, max_new_tokens: int = 24) -> tuple[str, dict[str, Any]]:
    """(greedy answer to QUESTION, the model's tensors)"""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32").eval()
    inputs = tokenizer.apply_chat_template([{"role": "user", "content": QUESTION}], add_generation_prompt=True,
                                           return_dict=True, return_tensors="pt")
    ids = model.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False)
    return tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True), model.state_dict()


def main() -> int:
    import torch

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True, help="the model that the run started from")
    args = parser.parse_args()
    if not json.loads((args.run_dir / "summary.json").read_text())["finished"]:
        print(f"{args.run_dir}: the run has not finished")
        return 1
    before, start = generate(args.model)
    after, trained = generate(args.run_dir / "export")
    changed = [name for name, value in start.items() if not torch.equal(value, trained[name])]
    finite = all(bool(value.isfinite().all()) for value in trained.values())
    largest = max(float((trained[name] - value).abs().max()) for name, value in start.items())
    print(f"{args.run_dir}/export: {len(changed)} of {len(start)} tensors changed, by at most {largest:.1e}; "
          f"{QUESTION!r} -> {after!r} (before: {before!r})")
    good = set(trained) == set(start) and finite and bool(changed) and EXPECTED in after
    if not good:
        print("NOT as expected: the export must have the same tensors, all finite, some changed, and know the answer")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
