"""Throughput and memory of the conversion tools, against `cp` + fsync of the same bytes on the same disk, in one run.

    python benchmarks/bench_convert.py --folder runs/bench_convert            # a 2 GB dense model
    python benchmarks/bench_convert.py --folder runs/bench_convert --names    # names of Qwen3-30B-A3B, small widths

Each tool runs as a person runs it: its own process, its own imports. Reported per direction: MB/s while converting
(data on disk), that over the mean of a copy before and one after, seconds of imports and verification apart, and the
peak of memory (proportional set size of the tool and its workers) above that of an idle interpreter with the same
imports.
Exit 1 where a direction is slower than a quarter of the copy or needs more than 3 times the largest tensor + 300 MB,
and with --names where it takes 60 s or more. Random weights: what they are does not matter here.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import time
from math import prod
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
TOOLS = ROOT / "tools/checkpoint_convert"
IDLE = ("import torch.distributed.checkpoint, luspo_megatron.convert.to_megatron, luspo_megatron.convert.to_hf, time; "
        "print('ready', flush=True); time.sleep(60)")
COMMON = {"num_attention_heads": 16, "num_key_value_heads": 8, "rms_norm_eps": 1e-6, "max_position_embeddings": 40960,
          "rope_theta": 1e6, "dtype": "bfloat16"}
TWO_GB = {"architectures": ["Qwen3ForCausalLM"], "num_hidden_layers": 14, "hidden_size": 2048, "head_dim": 128,
          "intermediate_size": 6144, "vocab_size": 151936, "tie_word_embeddings": True, **COMMON}
NAMES = {"architectures": ["Qwen3MoeForCausalLM"], "num_hidden_layers": 48, "hidden_size": 32, "head_dim": 8,
         "intermediate_size": 64, "vocab_size": 1000, "tie_word_embeddings": False, "num_experts": 128,
         "num_experts_per_tok": 8, "moe_intermediate_size": 24, "norm_topk_prob": True, **COMMON}


def make_model(folder: Path, config: dict[str, Any], shard_bytes: int = 500_000_000) -> tuple[int, int, int]:
    """(bytes, bytes of the largest tensor, tensors) of a random model, written with the safetensors library."""
    import torch
    from safetensors.torch import save_file

    from luspo_megatron.weights.architecture import parse_architecture
    from luspo_megatron.weights.table import WeightTable

    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    shapes = WeightTable(parse_architecture(config)).hf_shapes
    weight_map: dict[str, str] = {}
    part: dict[str, torch.Tensor] = {}
    generator = torch.Generator().manual_seed(0)

    def flush() -> None:
        name = f"model-{len(set(weight_map.values())) + 1:05d}.safetensors"
        save_file(part, folder / name)
        weight_map.update(dict.fromkeys(part, name))
        part.clear()

    size = 0
    for name, shape in shapes.items():
        bits = torch.randint(0, 2**15 - 2**8, shape, dtype=torch.int16, generator=generator)  # finite bfloat16 patterns
        part[name] = bits.view(torch.bfloat16)
        size += prod(shape) * 2
        if size > shard_bytes:
            flush()
            size = 0
    if part:
        flush()
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    sizes = [prod(shape) * 2 for shape in shapes.values()]
    return sum(sizes), max(sizes), len(sizes)


def copy_rate(source: Path, target: Path, nbytes: int) -> float:
    """MB/s of cp + fsync."""
    os.sync()
    began = time.monotonic()
    subprocess.run(["cp", "-r", source, target], check=True)
    for file in target.rglob("*"):
        if file.is_file():
            fd = os.open(file, os.O_RDONLY)
            os.fsync(fd)
            os.close(fd)
    seconds = time.monotonic() - began
    shutil.rmtree(target)
    return nbytes / 1e6 / seconds


def tree_mb(pid: int) -> float:
    """Proportional set size of a process and its children, MB."""
    pids = [pid]
    try:
        for task in Path(f"/proc/{pid}/task").iterdir():
            pids += map(int, (task / "children").read_text().split())
    except OSError:
        return 0.0
    total = 0
    for each in pids:
        try:
            total += int(re.search(r"^Pss:\s+(\d+)", Path(f"/proc/{each}/smaps_rollup").read_text(), re.M)[1])  # type: ignore[index]
        except (OSError, TypeError):
            continue
    return total / 1024


def idle_mb() -> float:
    with subprocess.Popen([sys.executable, "-c", IDLE], stdout=subprocess.PIPE, cwd=ROOT) as process:
        assert process.stdout is not None
        process.stdout.readline()
        mb = tree_mb(process.pid)
        process.kill()
    return mb


def run_tool(script: str, *arguments: object) -> dict[str, float]:
    """Seconds of each phase, the whole, and the peak of memory."""
    command = [sys.executable, str(TOOLS / script), *map(str, arguments), "--quiet"]
    began, peak, cpu = time.monotonic(), 0.0, children_cpu()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        while process.poll() is None:
            peak = max(peak, tree_mb(process.pid))
            time.sleep(0.05)
        assert process.stdout is not None
        text = process.stdout.read()
    if process.returncode:
        raise SystemExit(f"{script} failed with exit code {process.returncode}")
    phases = {name: float(seconds) for name, seconds in re.findall(r"([a-z ]+?) (\d+\.\d) s", text.splitlines()[-1])}
    return {name.strip(): seconds for name, seconds in phases.items()} | {
        "whole": time.monotonic() - began, "cpu": children_cpu() - cpu, "peak_mb": peak}


def children_cpu() -> float:
    """CPU seconds of all children that have ended: what a machine that others use as well does not distort."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="made and removed; the disk that is measured")
    parser.add_argument("--names", action="store_true", help="18,867 small tensors instead of 2 GB")
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()
    folder = args.folder.absolute()
    shutil.rmtree(folder, ignore_errors=True)
    nbytes, largest, tensors = make_model(folder / "hf", NAMES if args.names else TWO_GB)
    print(f"{tensors} tensors, {nbytes / 1e9:.3f} GB, the largest {largest / 2**20:.0f} MB, {args.workers} workers")
    idle, failures = idle_mb(), []
    ways = [("hf_to_megatron.py", ["--hf", folder / "hf", "--out", folder / "m", "--workers", args.workers,
                                   *(["--pp", "2", "--ep", "4"] if args.names else ["--pp", "2"])]),
            ("megatron_to_hf.py", ["--megatron", folder / "m", "--out", folder / "back", "--workers", args.workers,
                                   "--shard-size", "500MB"])]
    before = copy_rate(folder / "hf", folder / "copy", nbytes)
    for script, arguments in ways:
        found = run_tool(script, *arguments)
        after = copy_rate(folder / "hf", folder / "copy", nbytes)
        copy, rate = (before + after) / 2, nbytes / 1e6 / max(found["convert"], 0.05)
        memory, limit = found["peak_mb"] - idle, 3 * largest / 2**20 + 300
        print(f"{script}: convert {found['convert']:.1f} s = {rate:.0f} MB/s, copy {before:.0f} and {after:.0f} MB/s, "
              f"ratio {rate / copy:.2f}; imports {found['imports']:.1f} s, verify {found['verify']:.1f} s, "
              f"whole {found['whole']:.1f} s, CPU {found['cpu']:.1f} s; memory {memory:.0f} MB above {idle:.0f} MB "
              f"(limit {limit:.0f} MB)")
        if args.names and found["whole"] >= 60:
            failures.append(f"{script}: {found['whole']:.0f} s is not under 60 s")
        if not args.names and rate < copy / 4:
            failures.append(f"{script}: {rate:.0f} MB/s is less than a quarter of a copy's {copy:.0f} MB/s")
        if memory > limit:
            failures.append(f"{script}: {memory:.0f} MB is more than {limit:.0f} MB")
        before = after
    subprocess.run([sys.executable, TOOLS / "verify.py", folder / "hf", folder / "back", "--quiet"], check=True)
    shutil.rmtree(folder)
    print("\n".join(failures) or "within the limits")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
