"""One LUSPO loss and its gradients, computed by each contender of the loss benchmarks on the same inputs.

naive: logits of all tokens, log_softmax, autograd. liger: LigerFusedLinearGRPOLoss with loss_type luspo.
recompute / default / cache: this project's loss stage without a cache of exponentials, with the default of
loss.cache_bytes, and with 4/5 of them kept.

    python -m benchmarks.loss_cases CONTENDER --tokens T ...    prints the peak memory of one pass in bytes
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.memory import peak_above
from luspo_megatron.algorithm.objectives import policy_objective
from luspo_megatron.kernels.fused_logprob import HeadOptions, token_logprobs

CLIP_LOW, CLIP_HIGH = 2e-3, 2.5e-3
SEQUENCES = 5
IDLE = 2  # of them have coefficient zero in the idle problem: one by its advantage, one by the clip


@dataclass(frozen=True)
class Problem:
    """T packed response tokens of SEQUENCES sequences, all in the response mask."""

    hidden: Tensor  # [T, h]
    weight: Tensor  # [V, h]
    targets: Tensor  # [T]
    old_logprobs: Tensor  # [T] float32
    advantages: Tensor  # [SEQUENCES]
    cu_seqlens: Tensor  # [SEQUENCES + 1]

    @property
    def lengths(self) -> list[int]:
        return self.cu_seqlens.diff().tolist()  # type: ignore[no-any-return]


def make_problem(tokens: int, hidden: int, vocab: int, dtype: torch.dtype = torch.float32, device: str = "cpu",
                 idle: bool = False, seed: int = 0) -> Problem:
    """Every sequence has a gradient; with `idle`, 2 of the 5 (40% of the rows) have coefficient zero."""
    generator = torch.Generator(device).manual_seed(seed)
    normal = {"generator": generator, "device": device}
    x = torch.randn((tokens, hidden), **normal)
    weight = torch.randn((vocab, hidden), **normal) * hidden**-0.5 * 3
    targets = torch.randint(0, vocab, (tokens,), **normal)
    longest = -(-tokens // SEQUENCES)
    cu = torch.arange(SEQUENCES + 1, device=device).mul(longest).clamp(max=tokens).int()
    advantages = torch.tensor([1.0, -0.5, 0.8, -1.2, 0.6], device=device)
    x, weight = x.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_()
    old = _exact_logprobs(x, weight, targets)
    if idle:
        advantages[0] = 0.0
        old[cu[1] : cu[2]] += 1.0  # ratio e^-1 with a negative advantage: clipped
    return Problem(x, weight, targets, old, advantages, cu)


@torch.no_grad()
def _exact_logprobs(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """float32 log-probs, a few rows at a time, by torch's own cross entropy."""
    rows = []
    wide = weight.float().t()
    for part, y in zip(x.split(256), targets.split(256), strict=True):
        rows.append(-torch.nn.functional.cross_entropy(part.float() @ wide, y, reduction="none"))
    return torch.cat(rows)


def naive(problem: Problem) -> Tensor:
    logits = problem.hidden @ problem.weight.t()
    logprobs = torch.log_softmax(logits, -1).gather(-1, problem.targets[:, None])[:, 0]
    return plain_luspo(problem, logprobs)


def plain_luspo(problem: Problem, logprobs: Tensor) -> Tensor:
    total = logprobs.new_zeros(())
    parts = zip(logprobs.split(problem.lengths), problem.old_logprobs.split(problem.lengths), problem.advantages,
                strict=True)
    for logp, old, advantage in parts:
        ratio = (logp - old).mean().exp()
        clipped = ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH)
        total = total - len(logp) * torch.minimum(ratio * advantage, clipped * advantage)
    return total / SEQUENCES


def fused(problem: Problem, *, chunk_bytes: int = 0, cache_bytes: int = 0, entropy_coef: float = 0.0,
          backend: str = "auto") -> Tensor:
    rows = torch.ones_like(problem.targets, dtype=torch.bool)
    options = HeadOptions(problem.weight.shape[0], chunk_bytes=chunk_bytes, cache_bytes=cache_bytes,
                          backend=backend)  # type: ignore[arg-type]
    logprobs, entropy = token_logprobs(problem.hidden, problem.weight, problem.targets, rows, options)
    loss, _ = policy_objective(
        "luspo", logprobs=logprobs, old_logprobs=problem.old_logprobs, advantages=problem.advantages,
        cu_seqlens=problem.cu_seqlens, response_mask=rows, clip_low=CLIP_LOW, clip_high=CLIP_HIGH,
        global_num_sequences=SEQUENCES, global_num_tokens=rows.numel(), entropy=entropy, entropy_coef=entropy_coef)
    return loss


def recompute(problem: Problem) -> Tensor:
    return fused(problem)


def default(problem: Problem) -> Tensor:
    """With the default of loss.cache_bytes."""
    return fused(problem, cache_bytes=-1)


def cache(problem: Problem) -> Tensor:
    """With 4/5 of all exponentials kept: all of them alone are a third of what naive autograd holds."""
    return fused(problem, cache_bytes=4 * problem.targets.numel() * problem.weight.shape[0]
                 * problem.weight.element_size() // 5)


def liger(problem: Problem, compiled: bool = False) -> Tensor:
    """Liger wants rectangles: the sequences are padded to the longest, here by two tokens of 2048."""
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

    def rectangle(values: Tensor) -> Tensor:
        return torch.nn.utils.rnn.pad_sequence(list(values.split(problem.lengths)), batch_first=True)

    loss = LigerFusedLinearGRPOLoss(
        beta=0.0, compiled=compiled, use_ref_model=False, epsilon_low=CLIP_LOW, epsilon_high=CLIP_HIGH,
        loss_type="luspo", importance_sampling_level="sequence", temperature=1.0)
    return loss(rectangle(problem.hidden), problem.weight, rectangle(problem.targets),  # type: ignore[no-any-return]
                rectangle(torch.ones_like(problem.targets)), problem.advantages,
                old_per_token_logps=rectangle(problem.old_logprobs))[0]


CONTENDERS: dict[str, Callable[[Problem], Tensor]] = {
    "naive": naive, "liger": liger, "recompute": recompute, "default": default, "cache": cache}


def one_pass(name: str, problem: Problem) -> tuple[Tensor, Tensor, Tensor]:
    """Forward and backward: (loss, d hidden, d weight)."""
    problem.hidden.grad = problem.weight.grad = None
    loss = CONTENDERS[name](problem)
    loss.backward()
    assert problem.hidden.grad is not None and problem.weight.grad is not None
    out = loss.detach(), problem.hidden.grad, problem.weight.grad
    problem.hidden.grad = problem.weight.grad = None
    return out


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("contender", choices=CONTENDERS)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--vocab", type=int, default=32768)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    dtype = getattr(torch, args.dtype)
    one_pass(args.contender, make_problem(64, args.hidden, 4096, dtype))  # libraries and thread pools are loaded
    problem = make_problem(args.tokens, args.hidden, args.vocab, dtype)
    print(peak_above(lambda: one_pass(args.contender, problem)))


if __name__ == "__main__":
    main()
