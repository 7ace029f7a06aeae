"""One TP1 train step of a small Qwen3-MoE on the CUDA platform without Transformer Engine, against the CPU's.

    python -m benchmarks.gpu_step            (under 3 minutes; benchmarks/gpu.sh runs it after gpu_loss)
    python -m benchmarks.gpu_step --smoke    (the same code with the CPU in the place of the GPU)

Each run is a process of its own, since a process has one platform: CPU float32 first, which also fixes the old
log-probs, then CUDA float32 and bfloat16. Compared (TOLERANCE): log-probs, loss, gradient norm, gradients and updated
parameters by Hugging Face name. Each run then pushes its weights through the whole sync path
(plan, gather, buckets, checksums) into an in-process double of an engine, which must hold the parameters bitwise. Exit
status 1 when something is off. The model, the samples and the double are those of the tests.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

TOLERANCE = {
    "float32": {"logprobs": 1e-4, "loss": 1e-4, "gradient norm": 1e-4, "gradient": 1e-4, "updated": 1e-4},
    # a token near a tie of the router goes to another expert: gradients are compared as one vector, by its length
    "bfloat16": {"logprobs": 0.05, "loss": 0.05, "gradient norm": 0.05, "all gradients": 0.3, "updated": 0.05},
}
"""What is compared, and the largest difference that passes, relative to the largest element ("all gradients": length of
the difference over the length)."""

LEAST_SIZE = 1e-7  # every compared tensor has a larger element


def one(folder: Path, dtype: str) -> dict[str, Any]:
    """The step and the push on this process's platform; writes old.npz if it is not there yet."""
    import torch
    import torch.distributed as dist

    from luspo_megatron.actor.actor import Actor
    from luspo_megatron.actor.groups import join, leave
    from luspo_megatron.actor.policy_loss import policy_loss
    from luspo_megatron.config import AlgorithmConfig, BatchConfig, ModelConfig, ParallelConfig, WeightSyncConfig
    from luspo_megatron.parallel import ParallelLayout
    from luspo_megatron.platform import platform
    from luspo_megatron.weights.architecture import read_architecture
    from luspo_megatron.weights.sync import WeightSync
    from tests.distributed.actor_jobs import OPTIMIZER, assemble, by_sample, plan_of, shards
    from tests.distributed.sync_jobs import Engines
    from tests.tiny import samples_of

    platform()
    samples = samples_of(seed=5, groups=10)
    advantages = np.random.default_rng(2).normal(size=len(samples))
    model_folder = str(folder / "model")
    store = dist.FileStore(str(folder / f"store-{os.getpid()}"), 1)
    ranks = join(ParallelLayout(1), seed=1, store=store, rank=0)
    actor = Actor(read_architecture(model_folder, ""), ranks, optimizer=OPTIMIZER,
                  model=ModelConfig(hf=model_folder, dtype=dtype, transformer_engine="off"),  # type: ignore[arg-type]
                  parallel=ParallelConfig(distributed_optimizer=False),
                  batch=BatchConfig(max_tokens_per_micro_batch=96))
    actor.load_hf(model_folder)
    [mini_batch] = plan_of(actor, samples)
    micro_batches = mini_batch.micro_batches
    outputs = actor.logprobs(micro_batches)
    assert outputs is not None
    outputs = [(logp.cpu(), entropy.cpu()) for logp, entropy in outputs]
    logprobs = by_sample(micro_batches, outputs)
    fixed = folder / "old.npz"
    if not fixed.exists():
        noise = np.random.default_rng(3)
        np.savez(fixed, *[logp.numpy() + noise.normal(scale=0.05, size=logp.shape) for logp, _ in outputs])
    with np.load(fixed) as saved:
        old = [torch.from_numpy(saved[name]).float().to(actor.device) for name in saved.files]

    gradients: dict[str, Any] = {}
    step = actor.optimizer.step

    def step_and_look() -> Any:
        gradients.update(shards(actor, lambda p: p.main_grad.cpu()))
        return step()

    actor.optimizer.step = step_and_look
    algorithm = AlgorithmConfig(objective="luspo", clip_low=0.02, clip_high=0.03, entropy_coef=0.01)
    result = actor.train_step(mini_batch, policy_loss(algorithm, mini_batch, advantages, old_logprobs=old,
                                                      max_response_tokens=24), OPTIMIZER.lr)
    parameters = assemble([{"p": shards(actor, lambda p: p.cpu())}], "p", actor.table)

    engines = Engines(1, {})
    sync = WeightSync(actor.gpt, actor.table, ranks, WeightSyncConfig(transport="disk", folder=str(folder / "push")),
                      dtype=dtype, device=actor.device, engines=engines, timeout=60.0, warn=print)
    try:
        sync.push(1)
    finally:
        sync.close()
    [held] = engines.received
    differing = [name for name, value in parameters.items()
                 if not np.array_equal(held[name].float().numpy(), value)]
    if held.keys() != parameters.keys() or differing:
        raise RuntimeError(f"the engine's double does not hold the parameters: {sorted(differing)[:5]}")
    leave()
    dist.destroy_process_group()
    return {"logprobs": np.concatenate([logprobs[i] for i in sorted(logprobs)]),
            "loss": np.array(result.sums["loss"]), "gradient norm": np.array(result.gradient_norm),
            **{f"gradient of {name}": value
               for name, value in assemble([{"g": gradients}], "g", actor.table).items()},
            **{f"updated {name}": value for name, value in parameters.items()}}


def start(folder: Path, name: str, platform: str, dtype: str) -> dict[str, np.ndarray]:
    """The results of one process."""
    out = folder / f"{name}.npz"
    done = subprocess.run([sys.executable, "-m", "benchmarks.gpu_step", "--one", str(folder), dtype, str(out)],
                          env=os.environ | {"LUSPO_PLATFORM": platform}, capture_output=True, text=True, timeout=170)
    if done.returncode:
        raise RuntimeError(f"{name} failed:\n{done.stderr[-6000:]}")
    with np.load(out) as saved:
        return {key: saved[key] for key in saved.files}


def compare(got: dict[str, np.ndarray], want: dict[str, np.ndarray], tolerance: dict[str, float]) -> list[str]:
    """Prints the worst of each kind; returns what is off."""
    assert got.keys() == want.keys()
    worst: dict[str, tuple[float, str]] = {}
    off = []
    for key, value in want.items():
        kind = key.split()[0] if key.startswith(("gradient of", "updated")) else key
        largest = float(np.abs(value).max())
        assert largest > LEAST_SIZE, f"{key}: nothing to compare"
        error = float(np.abs(got[key] - value).max()) / largest
        worst[kind] = max(worst.get(kind, (0.0, "")), (error, key))
        if not error <= tolerance.get(kind, np.inf):
            off.append(f"{key}: {error:.1e}")
    names = [key for key in want if key.startswith("gradient of")]
    whole = [np.concatenate([values[name].ravel() for name in names]) for values in (got, want)]
    distance = float(np.linalg.norm(whole[0] - whole[1]) / np.linalg.norm(whole[1]))
    worst["all gradients"] = (distance, "all gradients")
    if not distance <= tolerance.get("all gradients", np.inf):
        off.append(f"all gradients: {distance:.1e}")
    for kind, (error, key) in worst.items():
        bound = f"<= {tolerance[kind]:.0e}" if kind in tolerance else "(not bounded)"
        print(f"  {kind:14} {error:.1e} {bound}   {key if key != kind else ''}")
    return off


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--smoke", action="store_true", help="the CPU in the place of the GPU")
    parser.add_argument("--one", nargs=3, metavar=("FOLDER", "DTYPE", "OUT"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        folder, dtype, out = args.one
        np.savez(out, **one(Path(folder), dtype))
        return 0
    import torch

    if not args.smoke and not torch.cuda.is_available():
        print("no CUDA device here; --smoke runs the code on the CPU")
        return 2
    from tests.tiny import save_model

    other = "cpu" if args.smoke else "cuda"
    off = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        save_model(folder / "model", "moe")
        want = start(folder, "reference", "cpu", "float32")
        for dtype, tolerance in TOLERANCE.items():
            print(f"{other} {dtype} against cpu float32")
            off += compare(start(folder, f"{other}-{dtype}", other, dtype), want, tolerance)
    print("\n".join(off) if off else "all within tolerance; every push arrived bitwise")
    return 1 if off else 0


if __name__ == "__main__":
    sys.exit(main())
