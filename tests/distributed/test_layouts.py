"""Every layout computes what one process and what Hugging Face compute: log-probs, loss, gradients, updated parameters.

The reference is transformers' model in float64 with the objective written out in explicit loops, and torch's AdamW. Not
covered: bfloat16, CUDA.
"""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from luspo_megatron.config import AlgorithmConfig
from tests.distributed.actor_jobs import OPTIMIZER, Case, assemble, one_step
from tests.tiny import samples_of, save_model
from tests.workers import pool

# wide enough that some sequences are clipped and some are not
ALGORITHM = AlgorithmConfig(objective="luspo", clip_low=0.02, clip_high=0.03, kl_coef=0.05, entropy_coef=0.01)

MOE = [
    Case(), Case(world=2), Case(world=2, tp=2), Case(world=2, tp=2, etp=2), Case(world=2, pp=2), Case(world=4, pp=4),
    Case(world=2, ep=2), Case(world=4, tp=2, pp=2), Case(world=2, tp=2, ep=2), Case(world=4, pp=2, ep=2),
    Case(world=4, tp=2, ep=2), Case(world=4, tp=2, ep=2, etp=2),
]
DENSE = [Case(), Case(world=2, tp=2), Case(world=2, tp=2, sequence_parallel=False), Case(world=2, pp=2), Case(world=2)]


def name_of(case: Case) -> str:
    return str(case.layout) + ("" if case.sequence_parallel else "-nosp")


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @functools.cache
    def make(kind: str, tied: bool) -> Path:
        return save_model(tmp_path_factory.mktemp(f"{kind}{tied}"), kind, tied=tied)

    return make


class Reference:
    """transformers in float64: log-probs, entropy, loss, gradients, one AdamW step."""

    def __init__(self, folder: Path, samples: list[Any], seed: int = 3) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        rng = np.random.default_rng(seed)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
        if hasattr(self.model.config, "_experts_implementation"):
            self.model.config._experts_implementation = "eager"
        self.samples = samples
        self.advantages = rng.normal(size=len(samples))
        rows = [self._rows(s) for s in samples]
        self.logprobs = [logp.detach().numpy() for logp, _ in rows]
        self.old = [x + rng.normal(scale=0.05, size=x.shape) for x in self.logprobs]
        self.ref = [x + rng.normal(scale=0.3, size=x.shape) for x in self.logprobs]
        loss = self._loss(rows)
        loss.backward()
        self.loss = float(loss.detach())
        self.gradients = self._named(lambda p: p.grad)
        norm = float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), OPTIMIZER.clip_grad))
        self.gradient_norm = norm
        before = self._named(lambda p: p)
        decay = [p for p in self.model.parameters() if p.ndim > 1]
        plain = [p for p in self.model.parameters() if p.ndim == 1]
        torch.optim.AdamW([{"params": decay}, {"params": plain, "weight_decay": 0.0}], lr=OPTIMIZER.lr,
                          betas=(OPTIMIZER.beta1, OPTIMIZER.beta2), eps=OPTIMIZER.eps,
                          weight_decay=OPTIMIZER.weight_decay).step()
        self.parameters = self._named(lambda p: p)
        self.largest_update = max(float(np.abs(self.parameters[n] - before[n]).max()) for n in before)

    def _rows(self, sample: Any) -> Any:
        import torch

        ids = torch.tensor([*sample.prompt_ids, *sample.response_ids])
        logp = torch.log_softmax(self.model(ids[None]).logits[0, :-1], -1)
        logp = logp[len(sample.prompt_ids) - 1 :]
        entropy = -(logp.exp() * logp).sum(-1)
        return logp.gather(-1, torch.tensor(sample.response_ids)[:, None])[:, 0], entropy

    def _loss(self, rows: Any) -> Any:
        """luspo + k3 KL - entropy, sequence by sequence, over all sequences."""
        import torch

        total = 0.0
        self.clipped = {}
        for i, (logp, entropy) in enumerate(rows):
            n, advantage = len(logp), float(self.advantages[i])
            ratio = (logp - torch.from_numpy(self.old[i])).mean().exp()
            low, high = 1 - ALGORITHM.clip_low, 1 + ALGORITHM.clip_high
            surrogate = torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage)
            self.clipped[i] = float((advantage > 0 and ratio > high) or (advantage < 0 and ratio < low))
            d = torch.from_numpy(self.ref[i]) - logp
            total = total - n * surrogate + ALGORITHM.kl_coef * (d.exp() - d - 1).sum()
            total = total - ALGORITHM.entropy_coef * entropy.sum()
        return total / len(rows)

    def _named(self, tensor_of: Any) -> dict[str, np.ndarray]:
        """Hugging Face's on-disk names; experts are fused in memory."""
        out = {}
        for name, parameter in self.model.named_parameters():
            value = tensor_of(parameter).detach().numpy().copy()
            if ".mlp.experts." not in name:
                out[name] = value
                continue
            prefix = name.rsplit(".", 1)[0]
            for e, expert in enumerate(value):
                if name.endswith("gate_up_proj"):
                    out[f"{prefix}.{e}.gate_proj.weight"], out[f"{prefix}.{e}.up_proj.weight"] = np.split(expert, 2)
                else:
                    out[f"{prefix}.{e}.down_proj.weight"] = expert
        return out


@pytest.fixture(scope="session")
def references(models: Any) -> Any:
    @functools.cache
    def make(kind: str, tied: bool) -> tuple[Path, Reference]:
        folder = models(kind, tied)
        return folder, Reference(folder, samples_of(seed=5, groups=5, group_size=3))

    return make


def run(case: Case, folder: Path, reference: Reference) -> list[dict[str, Any]]:
    return pool(case.world).run(one_step, case, folder, reference.samples, reference.advantages, reference.old,
                                ALGORITHM, reference.ref)


def close(name: str, got: np.ndarray, want: np.ndarray, tolerance: float) -> None:
    """Largest difference relative to the largest element, which must not be near zero."""
    scale = float(np.abs(want).max())
    assert scale > 1e-7, f"{name}: the reference is near zero ({scale})"
    worst = float(np.abs(got - want).max())
    assert worst <= tolerance * scale, f"{name}: {worst / scale:.2e} of the largest element, allowed {tolerance:.0e}"


CASES = ([("moe", False, case) for case in MOE] + [("dense", False, case) for case in DENSE]
         + [("dense", True, case) for case in (Case(), Case(world=2, tp=2), Case(world=2, pp=2))]
         + [("moe", True, case) for case in (Case(world=2, tp=2, ep=2), Case(world=4, tp=2, pp=2))]
         + [("dense", False, Case(world=4, tp=4)), ("qwen2", False, Case(world=4, tp=4))]  # 2 key-value heads
         + [("qwen2", False, case) for case in (Case(), Case(world=2, tp=2), Case(world=2, pp=2))]
         + [("qwen2", True, Case(world=4, tp=2, pp=2)), ("llama", True, Case(world=2, pp=2)),
            ("llama3", False, Case()), ("llama3", False, Case(world=2, tp=2)), ("mistral", False, Case(world=2, tp=2)),
            ("mistral", False, Case(world=2, pp=2))]
         + [("moe", False, dataclasses.replace(Case(world=2, tp=2, ep=2), recompute="full"))]
         + [("dense", True, dataclasses.replace(Case(world=2, tp=2), cache_bytes=2**30))])


@pytest.mark.parametrize(("kind", "tied", "case"), CASES,
                         ids=[f"{k}{'-tied' if t else ''}-{name_of(c)}{'-cache' if c.cache_bytes else ''}-{c.recompute}"
                              for k, t, c in CASES])
def test_one_step(kind: str, tied: bool, case: Case, references: Any) -> None:
    from luspo_megatron.weights.architecture import read_architecture
    from luspo_megatron.weights.table import WeightTable

    folder, reference = references(kind, tied)
    table = WeightTable(read_architecture(folder))
    assert 0 < sum(reference.clipped.values()) < len(reference.samples)

    # gradients: without the distributed optimizer, whose ranks hold parts of the sum only
    plain = run(dataclasses.replace(case, distributed_optimizer=False), folder, reference)
    logprobs = {i: v for result in plain for i, v in result["logprobs"].items()}
    assert sorted(logprobs) == list(range(len(reference.samples)))
    for i, want in enumerate(reference.logprobs):
        close(f"log-probs of sample {i}", logprobs[i], want, 1e-5)
    sums = plain[0]["sums"]
    assert abs(sums["loss"] - reference.loss) <= 1e-5 * abs(reference.loss) > 1e-7
    assert plain[0]["per_sample"]["clipped"] == reference.clipped
    assert abs(plain[0]["gradient_norm"] / reference.gradient_norm - 1) <= 1e-5
    gradients = assemble(plain, "gradients", table)
    assert set(gradients) == set(reference.gradients)
    for name, want in reference.gradients.items():
        close(f"gradient of {name}", gradients[name], want, 1e-5)

    assert reference.largest_update >= 1e-4
    for results in (plain, run(case, folder, reference)):
        parameters = assemble(results, "parameters", table)
        for name, want in reference.parameters.items():
            assert np.abs(parameters[name] - want).max() <= 1e-6, name
