"""The whole LUSPO loss of the loss stage in one process against the float64 oracle of tests/loss_inputs.py.

Covered: packed sequences with an empty one, prompts, clipped sequences (whose rows skip the backward), padded
vocabulary, temperature, KL, entropy, chunks, exponentials kept wholly, partly or not. Layouts: tests/distributed/
test_loss_layouts.py; Triton kernels: test_triton_rows.py.
"""

from __future__ import annotations

import gc

import pytest
import torch

from luspo_megatron.kernels.fused_logprob import HeadOptions, token_logprobs
from tests.fused_loss import errors, fused
from tests.loss_inputs import make_inputs, oracle

SETTINGS = {
    "plain": {},
    "temperature": {"temperature": 0.7},
    "kl": {"kl_coef": 0.05},
    "entropy": {"entropy_coef": 0.01, "temperature": 1.3},
    "all": {"kl_coef": 0.05, "entropy_coef": 0.01, "temperature": 0.7},
}
ROWS = 128 * 20 * 8  # bytes of a chunk of 128 columns of about twenty float64 rows
OPTIONS = {
    "whole": {}, "chunks": {"chunk_bytes": 1}, "cache": {"cache_bytes": 2**40},
    "chunks-cache": {"chunk_bytes": 1, "cache_bytes": 2**40},
    "chunks-part": {"chunk_bytes": 1, "cache_bytes": 2 * ROWS}, "default": {"chunk_bytes": 1, "cache_bytes": -1},
}


@pytest.mark.parametrize("options", sorted(OPTIONS))
@pytest.mark.parametrize("settings", sorted(SETTINGS))
@pytest.mark.parametrize(("dtype", "tolerance", "routine"), [
    (torch.float64, 1e-12, "torch"), (torch.float32, 4e-7, "torch"), (torch.float32, 4e-7, "onednn"),
], ids=["fp64", "fp32", "fp32-onednn"])
def test_loss_and_gradients(dtype: torch.dtype, tolerance: float, routine: str, settings: str, options: str,
                            request: pytest.FixtureRequest) -> None:
    calls = request.getfixturevalue("onednn") if routine == "onednn" else []
    inputs = make_inputs(dtype=dtype, **SETTINGS[settings])
    want = oracle(inputs)
    assert 0 < want.clipped < 4, "some sequences are clipped and some are not"
    got = fused(inputs.to(dtype), **OPTIONS[options])
    assert (routine == "onednn") == bool(calls)
    assert got.clipped == want.clipped and got.logprobs.dtype == got.entropy.dtype == dtype
    found = errors(got, want, inputs.mask)
    assert found["logprobs"] <= tolerance and found["entropy"] <= tolerance, found
    # A coefficient holds e^(log-prob): its relative error is the absolute one of a float32 log-prob of size 10, 1e-6.
    # Given coefficients, gradients are right to 5e-7: test_token_logprobs.py.
    assert max(found.values()) <= (tolerance if dtype == torch.float64 else 1.5e-6), found
    assert got.grad_hidden[~inputs.mask].eq(0).all() and got.grad_weight[inputs.vocab :].eq(0).all()


@pytest.mark.parametrize("options", sorted(OPTIONS))
@pytest.mark.parametrize("settings", ["plain", "all"])
def test_bfloat16(settings: str, options: str) -> None:
    """Log-probs and entropy are float32 of float32 logits; gradients are rounded to bfloat16 (8 bits)."""
    inputs = make_inputs(dtype=torch.bfloat16, **SETTINGS[settings])
    got, want = fused(inputs.to(torch.bfloat16), **OPTIONS[options]), oracle(inputs)
    found = errors(got, want, inputs.mask)
    assert got.logprobs.dtype == torch.float32 and got.grad_weight.dtype == torch.bfloat16
    assert found["logprobs"] <= 4e-7 and found["entropy"] <= 4e-7 and found["loss"] <= 4e-6, found
    assert found["d hidden"] <= 2**-7 and found["d weight"] <= 2**-7, found


def test_main_grad_stays_float32_for_bfloat16_weights() -> None:
    """Many small micro-batches: a bfloat16 sum would stop growing at 2^8 times the summand."""
    inputs = make_inputs(dtype=torch.bfloat16).to(torch.bfloat16)
    parameter = torch.nn.Parameter(inputs.weight.clone())
    parameter.main_grad = torch.zeros(parameter.shape, dtype=torch.float32)  # type: ignore[attr-defined]
    first = None
    for _ in range(600):
        logprobs, _ = token_logprobs(inputs.hidden, parameter, inputs.targets, inputs.mask, HeadOptions(inputs.vocab))
        logprobs.sum().backward()
        first = parameter.main_grad.clone() if first is None else first  # type: ignore[attr-defined]
    assert first is not None and first.abs().max() > 1
    error = (parameter.main_grad - 600 * first).abs().max() / (600 * first).abs().max()  # type: ignore[attr-defined]
    assert error <= 1e-5


@pytest.mark.parametrize("tied", [False, True])
def test_what_autograd_gets_beside_main_grad(tied: bool) -> None:
    """megatron's DDP adds .grad to main_grad for tied heads (zero_out_wgrad), so that must be 0; else only its shape
    matters."""
    inputs = make_inputs()
    parameter = torch.nn.Parameter(inputs.weight.clone())
    parameter.main_grad = torch.zeros_like(parameter)  # type: ignore[attr-defined]
    parameter.zero_out_wgrad = tied  # type: ignore[attr-defined]
    token_logprobs(inputs.hidden, parameter, inputs.targets, inputs.mask, HeadOptions(inputs.vocab))[0].sum().backward()
    assert parameter.grad is not None and parameter.grad.shape == parameter.shape
    assert not tied or parameter.grad.eq(0).all()
    assert parameter.main_grad.abs().max() > 1  # type: ignore[attr-defined]


def live_bytes() -> int:
    gc.collect()
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in gc.get_objects()
                if type(x) in (torch.Tensor, torch.nn.Parameter)}
    return sum(storages.values())


@pytest.mark.parametrize("grad", [False, True])
def test_forward_only_keeps_nothing(grad: bool) -> None:
    """Under no_grad only the two results outlive the call, however large a cache is allowed."""
    inputs = make_inputs(lengths=(400,), vocab=3000, padded=3072, hidden=8).to(torch.float32)
    weight = inputs.weight.requires_grad_()
    before = live_bytes()
    with torch.set_grad_enabled(grad):
        found = token_logprobs(inputs.hidden, weight, inputs.targets, inputs.mask,
                               HeadOptions(inputs.vocab, cache_bytes=2**40))
    rows = int(inputs.mask.sum())
    kept = live_bytes() - before
    if grad:
        assert found[0].grad_fn is not None and len(found[0].grad_fn.cache.entries) > 0
    else:
        assert found[0].grad_fn is None and kept == 2 * 4 * rows


def test_a_second_backward_recomputes_what_the_first_used_up() -> None:
    inputs = make_inputs()
    hidden, weight = inputs.hidden.requires_grad_(), inputs.weight.requires_grad_()
    logprobs, entropy = token_logprobs(hidden, weight, inputs.targets, inputs.mask,
                                       HeadOptions(inputs.vocab, chunk_bytes=1, cache_bytes=2**40))
    loss = logprobs.sum() + 0.1 * entropy.sum()
    first = torch.autograd.grad(loss, (hidden, weight), retain_graph=True)
    assert logprobs.grad_fn is not None and not logprobs.grad_fn.cache.entries
    for a, b in zip(first, torch.autograd.grad(loss, (hidden, weight)), strict=True):
        assert a.abs().max() > 0.5 and (a - b).abs().max() <= 1e-12 * a.abs().max()
