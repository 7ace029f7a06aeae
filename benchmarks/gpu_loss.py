"""The loss stage on one Hopper GPU: correctness in bfloat16 against float64, then time and memory against its peers.

    python -m benchmarks.gpu_loss [--limit-s 330] [--csv FILE]        (benchmarks/gpu.sh runs it with gpu_step)
    python -m benchmarks.gpu_loss --smoke                             (tiny, on the CPU with the torch backend)

Cases: T 8192 and 32768, Qwen3-30B-A3B's head (V 151936, h 2048), whole and as the shard of one of 4 and of 8
tensor-parallel ranks (without communication), forward + backward, bfloat16. Contenders: benchmarks/loss_cases.py, and
Transformer Engine's cross entropy where it is installed. A row: ms (best of the rounds), TFLOP/s and share of the
roofline counted as 8 T h V operations at --peak-tflops whatever a contender does, peak GiB above the inputs. Each case
begins only while --limit-s has room; what was left out is printed. Exit status 1 when a kernel is wrong, or (on a GPU)
a target missed: 80% of the roofline with recompute, 100% with the cache, no more memory than the smallest peer.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from benchmarks import loss_cases
from benchmarks.loss_cases import Problem, fused, make_problem, plain_luspo
from luspo_megatron.kernels.fused_logprob import HeadOptions, token_logprobs

OURS = ("recompute", "default", "cache")
TOLERANCE = {"log-probs": 2e-6, "entropy": 2e-6, "d hidden": 2**-7, "d weight": 2**-7}


@dataclass(frozen=True)
class Sizes:
    tokens: tuple[int, ...]
    hidden: int
    vocab: int
    shards: tuple[int, ...]
    rounds: int


FULL = Sizes((8192, 32768), 2048, 151936, (8, 4, 1), 5)
SMOKE = Sizes((64, 256), 32, 1024, (2, 1), 1)


@dataclass(frozen=True)
class Row:
    contender: str
    tokens: int
    tp: int
    ms: float
    tflops: float
    roofline: float
    peak_gib: float


# ---------------------------------------------------------------- correctness

def exact(x: Tensor, weight: Tensor, targets: Tensor, c: Tensor, ce: Tensor,
          rows_at_once: int = 64) -> tuple[Tensor, ...]:
    """(log-probs, entropy, d hidden, d weight) in float64 for coefficients c, ce [T], from the formulas, in slices."""
    wide, grad_weight = weight.double(), torch.zeros(weight.shape, dtype=torch.float64, device=weight.device)
    parts = []
    for i in range(0, len(x), rows_at_once):
        at = slice(i, i + rows_at_once)
        logp = torch.log_softmax(x[at].double() @ wide.t(), -1)
        p, picked = logp.exp(), targets[at, None]
        entropy = -(p * logp).sum(-1, keepdim=True)
        g = -p * (c[at, None] + ce[at, None] * (logp + entropy))
        g.scatter_add_(-1, picked, c[at, None])
        grad_weight += g.t() @ x[at].double()
        parts.append((logp.gather(-1, picked)[:, 0], entropy[:, 0], g @ wide))
    return (*(torch.cat(part) for part in zip(*parts, strict=True)), grad_weight)


def check(sizes: Sizes, device: str, backends: tuple[str, ...]) -> Iterator[tuple[str, str, float]]:
    """(case, quantity, largest difference / largest element): each backend, cache and chunk, with and without entropy
    gradients, with a third of the rows idle."""
    tokens = min(1024, sizes.tokens[0])
    vocab = sizes.vocab // sizes.shards[0]
    problem = make_problem(tokens, sizes.hidden, vocab, torch.bfloat16, device)
    x, weight, targets = problem.hidden, problem.weight, problem.targets
    generator = torch.Generator(device).manual_seed(1)
    c = torch.randn(tokens, generator=generator, device=device, dtype=torch.float64)
    c[::3] = 0.0
    small_chunk = tokens * 6 * (vocab // 3)
    for with_entropy in (False, True):
        ce = c * 0.3 * with_entropy
        want = exact(x.detach(), weight.detach(), targets, c, ce)
        for backend in backends:
            for name, options in (("recompute", {}), ("cache", {"cache_bytes": 2**62}),
                                  ("default", {"cache_bytes": -1}),
                                  ("chunks", {"chunk_bytes": small_chunk, "cache_bytes": -1})):
                x.grad = weight.grad = None
                found = token_logprobs(x, weight, targets, torch.ones_like(targets, dtype=torch.bool),
                                       HeadOptions(vocab, backend=backend, **options))  # type: ignore[arg-type]
                torch.autograd.backward(found, (c.to(found[0].dtype), ce.to(found[0].dtype)))
                assert x.grad is not None and weight.grad is not None
                for quantity, got, value in zip(TOLERANCE, (*found, x.grad, weight.grad), want, strict=True):
                    largest = value.abs().max()
                    assert largest > 1e-3, f"{quantity}: nothing to compare"
                    yield (f"{backend} {name} entropy={with_entropy}", quantity,
                           float((got.detach().double() - value).abs().max() / largest))
    x.grad = weight.grad = None


# ---------------------------------------------------------------- contenders

def te_cross_entropy() -> Callable[[Problem], Tensor] | None:
    """LUSPO on Transformer Engine's Triton cross entropy; None where it is not installed."""
    try:
        from transformer_engine.pytorch.cross_entropy import parallel_cross_entropy
    except (ImportError, RuntimeError, OSError):
        return None

    def te(problem: Problem) -> Tensor:
        logits = problem.hidden @ problem.weight.t()
        losses = parallel_cross_entropy(logits[None], problem.targets[None], 0.0, False, None)
        return plain_luspo(problem, -losses.view(-1).float())

    return te


def naive_float32(problem: Problem) -> Tensor:
    """What is usually written: bfloat16 logits, log_softmax in float32."""
    logits = problem.hidden @ problem.weight.t()
    logprobs = torch.log_softmax(logits.float(), -1).gather(-1, problem.targets[:, None])[:, 0]
    return plain_luspo(problem, logprobs)


def contenders(smoke: bool) -> dict[str, Callable[[Problem], Tensor]]:
    out: dict[str, Callable[[Problem], Tensor]] = {
        "recompute": loss_cases.recompute, "default": loss_cases.default,
        "cache": lambda problem: fused(problem, cache_bytes=2**62), "naive": naive_float32}
    try:
        import liger_kernel  # noqa: F401
    except ImportError:
        print("liger-kernel is not installed: left out")
    else:
        out["liger"] = lambda problem: loss_cases.liger(problem, compiled=not smoke)
    te = None if smoke else te_cross_entropy()
    if te is None:
        print("Transformer Engine is not used: left out")
    else:
        out["te"] = te
    return out


# ---------------------------------------------------------------- time and memory

def measure(loss: Callable[[Problem], Tensor], problem: Problem, rounds: int) -> tuple[float, float]:
    """(best seconds, peak bytes above the inputs; 0 on the CPU) of forward + backward, after one round unmeasured."""
    cuda = problem.hidden.is_cuda
    best, peak = float("inf"), 0.0
    for turn in range(rounds + 1):
        problem.hidden.grad = problem.weight.grad = None
        if cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        start = time.perf_counter()
        loss(problem).backward()
        if cuda:
            torch.cuda.synchronize()
            peak = float(torch.cuda.max_memory_allocated() - before)
        if turn:
            best = min(best, time.perf_counter() - start)
    problem.hidden.grad = problem.weight.grad = None
    return best, peak


def rows(sizes: Sizes, device: str, deadline: float, peak_tflops: float, smoke: bool) -> Iterator[Row]:
    everyone = contenders(smoke)
    for tokens in sizes.tokens:
        for tp in sizes.shards:
            vocab = sizes.vocab // tp
            problem = make_problem(tokens, sizes.hidden, vocab, torch.bfloat16, device)
            operations = 8.0 * tokens * sizes.hidden * vocab
            for name, loss in everyone.items():
                if time.monotonic() > deadline:
                    print(f"left out for lack of time: {name} T={tokens} tp={tp}")
                    continue
                try:
                    seconds, peak = measure(loss, problem, sizes.rounds)
                except torch.OutOfMemoryError:
                    print(f"out of memory: {name} T={tokens} tp={tp}")
                    torch.cuda.empty_cache()
                    continue
                rate = operations / seconds / 1e12
                yield Row(name, tokens, tp, seconds * 1e3, rate, rate / peak_tflops, peak / 2**30)
            del problem


def missed(found: list[Row]) -> list[str]:
    """The targets that a GPU run misses."""
    out = []
    for row in found:
        least = {"recompute": 0.8, "cache": 1.0}.get(row.contender, 0.0)
        if row.roofline < least:
            out.append(f"{row.contender} T={row.tokens} tp={row.tp}: {row.roofline:.0%} of the roofline < {least:.0%}")
        peers = [other.peak_gib for other in found
                 if (other.tokens, other.tp) == (row.tokens, row.tp) and other.contender not in OURS]
        if row.contender == "recompute" and peers and row.peak_gib > min(peers):
            out.append(f"recompute T={row.tokens} tp={row.tp}: {row.peak_gib:.2f} GiB > smallest peer {min(peers):.2f}")
    return out


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--smoke", action="store_true", help="tiny sizes on the CPU; no target counts")
    parser.add_argument("--limit-s", type=float, default=330, help="no case begins later than this")
    parser.add_argument("--peak-tflops", type=float, default=790, help="dense bfloat16 rate that counts as 100%%")
    parser.add_argument("--csv")
    args = parser.parse_args()
    deadline = time.monotonic() + args.limit_s
    if not args.smoke and not torch.cuda.is_available():
        print("no CUDA device here; --smoke runs the code on the CPU")
        return 2
    device, sizes = ("cpu", SMOKE) if args.smoke else ("cuda", FULL)
    print(device if args.smoke else torch.cuda.get_device_name(), f"torch {torch.__version__}")

    wrong = []
    for case, quantity, error in check(sizes, device, ("torch",) if args.smoke else ("triton", "torch")):
        good = error <= TOLERANCE[quantity]
        print(f"{case:36} {quantity:10} {error:.1e}{'' if good else '   WRONG'}", flush=True)
        wrong += [] if good else [f"{case} {quantity}: {error:.1e}"]

    print(f"{'contender':10} {'T':>6} {'tp':>3} {'ms':>9} {'TFLOP/s':>8} {'roofline':>8} {'GiB':>7}")
    found = []
    for row in rows(sizes, device, deadline, args.peak_tflops, args.smoke):
        found.append(row)
        print(f"{row.contender:10} {row.tokens:6} {row.tp:3} {row.ms:9.2f} {row.tflops:8.3f} {row.roofline:8.1%} "
              f"{row.peak_gib:7.2f}", flush=True)
    misses = [] if args.smoke else missed(found)
    if args.csv:
        with open(args.csv, "w", newline="") as file:
            writer = csv.DictWriter(file, list(Row.__dataclass_fields__))
            writer.writeheader()
            writer.writerows(asdict(row) for row in found)
    print(json.dumps({"wrong": wrong, "missed": misses, "rows": [asdict(row) for row in found]}))
    return 1 if wrong or misses else 0


if __name__ == "__main__":
    sys.exit(main())
