"""policy_objective against numbers made elsewhere, against explicit loops, and under what must not matter.

Comparisons are relative to the largest element and assert that it is not near zero. Not covered: context parallelism
and CUDA.
"""

import json
import math
import runpy
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from luspo_megatron.algorithm.objectives import (
    OBJECTIVES,
    Objective,
    policy_objective,
    resolve_objective,
    supervised_objective,
)
from luspo_megatron.algorithm.statistics import METRICS, PER_SEQUENCE, reduce_statistics
from luspo_megatron.errors import UserError

GOLDENS = Path(__file__).parents[1] / "goldens"
CASES = {case["name"][0]: case for case in json.loads((GOLDENS / "luspo_goldens.json").read_text())["cases"]}
reference = runpy.run_path(str(GOLDENS / "reference.py"))["objective"]
NAMES = list(OBJECTIVES)
NAN, INF = math.nan, math.inf
property_test = settings(max_examples=25, deadline=None, derandomize=True)


def assert_close(actual, expected, tolerance=1e-10, floor=1e-6):
    """Relative to the largest element of what is expected, which must not be near zero."""
    actual = torch.as_tensor(actual, dtype=torch.float64)
    expected = torch.as_tensor(expected, dtype=torch.float64)
    assert actual.shape == expected.shape
    largest = expected.abs().max()
    assert largest > floor, f"compares nothing: largest element {largest}"
    assert bool(torch.isfinite(actual).all())
    difference = (actual - expected).abs().max()
    assert difference <= tolerance * largest, f"{difference} against {tolerance} x {largest}"


def golden_sequences(case):
    masks = case.get("mask") or [[1] * len(row) for row in case["logp_new"]]
    rows = zip(case["logp_new"], case["logp_old"], masks, case["advantages"], strict=True)
    return [{"new": n, "old": o, "mask": m, "advantage": a} for n, o, m, a in rows]


def flat(sequences, key, default=0.0):
    return [x for s in sequences for x in s.get(key, [default] * len(s["new"]))]


def run(name, sequences, *, low=2e-3, high=2.5e-3, n_seq=None, n_tokens=None, dtype=torch.float64, **options):
    """(loss, gradient [T], statistics) of a list of sequence dicts. Global counts default to what is passed."""
    logprobs = torch.tensor(flat(sequences, "new"), dtype=dtype, requires_grad=True)
    mask = torch.tensor(flat(sequences, "mask"), dtype=torch.bool)
    for option, key in (("ref_logprobs", "ref"), ("entropy", "entropy"), ("rollout_weights", "rollout_weight")):
        if any(key in s for s in sequences):
            options.setdefault(option, torch.tensor(flat(sequences, key), dtype=dtype))
    loss, statistics = policy_objective(
        name,
        logprobs=logprobs,
        old_logprobs=torch.tensor(flat(sequences, "old"), dtype=dtype),
        advantages=torch.tensor([s["advantage"] for s in sequences], dtype=torch.float64),
        cu_seqlens=torch.tensor([0, *(len(s["new"]) for s in sequences)]).cumsum(0).int(),
        response_mask=mask,
        clip_low=low,
        clip_high=high,
        global_num_sequences=n_seq or len(sequences),
        global_num_tokens=int(mask.sum()) if n_tokens is None else n_tokens,
        max_response_length=8,
        **options,
    )
    loss.backward()
    return loss.detach(), logprobs.grad, statistics


def random_sequences(seed, n=8, longest=9, spread=0.01, extras=True):
    """Prompt positions (masked, with garbage), responses of 0..longest tokens, everything of order one."""
    generator = torch.Generator().manual_seed(seed)

    def rand(k, low, high):
        return (low + (high - low) * torch.rand(k, generator=generator, dtype=torch.float64)).tolist()

    out = []
    for i in range(n):
        before, length = int(rand(1, 1, 4)[0]), 0 if i == n // 2 else int(rand(1, 1, longest + 1)[0])
        size = before + length + 1
        new = rand(size, -3, -0.1)
        out.append({
            "new": new,
            "old": [a + b for a, b in zip(new, rand(size, -spread, spread), strict=True)],
            "mask": [0] * before + [1] * length + [0],
            "advantage": rand(1, 0.3, 2)[0] * (-1) ** i,
        })  # fmt: skip
        if extras:
            out[-1] |= {
                "ref": [a + b for a, b in zip(new, rand(size, -0.7, 0.7), strict=True)],
                "entropy": rand(size, 0.1, 3),
                "rollout_weight": rand(size, 0.5, 2),
            }
    return out


# ---------------------------------------------------------------------------------------------- goldens and loops


@pytest.mark.parametrize("name", NAMES)
def test_token_weight_is_the_gradient_per_advantage(name):
    """Against autograd: mean over the tokens of |dJ/dlogp| / |A|, times the objective's denominator."""
    generator = torch.Generator().manual_seed(7)
    lengths, advantages = [2, 5, 3, 8, 4, 0], [1.5, -0.5, 1.0, -1.0, 0.7, 1.0]
    sequences = [{"old": (old := -torch.rand(n, generator=generator, dtype=torch.float64)).tolist(), "mask": [1] * n,
                  "new": (old + 0.2 * torch.randn(n, generator=generator, dtype=torch.float64)).tolist(),
                  "advantage": a} for n, a in zip(lengths, advantages, strict=True)]
    loss, gradient, statistics = run(name, sequences, low=0.08, high=0.08)
    denominator = {"luspo": 6, "gspo": 6, "grpo": 6, "drgrpo": 6 * 8, "dapo": sum(lengths), "cispo": sum(lengths)}[name]
    parts = torch.as_tensor(gradient).split(lengths)
    expected = [float(part.abs().mean()) * denominator / abs(a) if len(part) else 0.0
                for part, a in zip(parts, advantages, strict=True)]
    assert_close(statistics["token_weight"], expected)
    assert name == "cispo" or 0 < statistics["clipped"].sum() < 5  # some are clipped, some are not


@pytest.mark.parametrize("order", ["given", "reversed", "rotated"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", NAMES)
def test_goldens(name, case, order):
    golden = CASES[case]
    sequences, gradients = golden_sequences(golden), golden["expected"][name]["grad"]
    arrange = {"given": lambda x: x, "reversed": lambda x: x[::-1], "rotated": lambda x: x[2:] + x[:2]}[order]
    loss, gradient, statistics = run(name, arrange(sequences), low=golden["eps_low"], high=golden["eps_high"])
    expected = torch.tensor([x for row in arrange(gradients) for x in row], dtype=torch.float64)
    assert_close(gradient, -expected, floor=1e-3)
    tolerance = 1e-10 * expected.abs().max().item()  # J may be 0 where the gradient is not
    assert loss.item() == pytest.approx(-golden["expected"][name]["J"], rel=1e-10, abs=tolerance)
    if name in ("luspo", "gspo"):
        info = arrange(golden["expected"][name]["info"])
        assert_close(statistics["seq_ratio"], [x["s"] for x in info])
        assert statistics["clipped"].bool().tolist() == [x["clipped"] for x in info]


def test_goldens_clip_both_signs():
    """The golden cases would not see a clip that never acts, or acts on the wrong sign."""
    _, _, statistics = run("luspo", golden_sequences(CASES["B"]))
    assert statistics["clipped"].tolist() == [1, 0, 0, 1, 0]
    assert (statistics["clipped_positive"], statistics["clipped_negative"]) == (1, 1)
    assert (statistics["units_positive"], statistics["units_negative"]) == (2, 3)
    metrics = reduce_statistics([statistics])
    assert metrics["clip_fraction_positive"] == 0.5
    assert metrics["clip_fraction_negative"] == pytest.approx(1 / 3)


@pytest.mark.parametrize("terms", ["policy", "kl", "entropy", "rollout", "all"])
@pytest.mark.parametrize("name", NAMES)
def test_terms_against_loops(name, terms):
    sequences = random_sequences(3, spread=0.5 if OBJECTIVES[name].importance == "token" else 0.02)
    for sequence in sequences:
        keep = {"kl": ["ref"], "entropy": ["entropy"], "rollout": ["rollout_weight"], "policy": []}
        for key in ("ref", "entropy", "rollout_weight"):
            if terms != "all" and key not in keep[terms]:
                del sequence[key]
    coefficients = {"kl_coef": 0.1 * (terms in ("kl", "all")), "entropy_coef": 0.2 * (terms in ("entropy", "all"))}
    low, high = (0.2, 0.28) if OBJECTIVES[name].importance == "token" else (2e-3, 2.5e-3)
    loss, gradient, statistics = run(name, sequences, low=low, high=high, n_seq=11, n_tokens=77, **coefficients)
    value, gradients = reference(name, sequences, low, high, 11, 77, **coefficients)
    assert_close(gradient, [-x for row in gradients for x in row], 1e-12)
    assert_close(loss, -value, 1e-12)
    assert 0 < statistics["clipped_positive"] + statistics["clipped_negative"] < statistics["units"]


@pytest.mark.parametrize("name", NAMES)
def test_entropy_gradient_is_the_token_weight(name):
    sequences = random_sequences(5)
    entropy = torch.tensor(flat(sequences, "entropy"), dtype=torch.float64, requires_grad=True)
    logprobs = torch.tensor(flat(sequences, "new"), dtype=torch.float64)
    mask = torch.tensor(flat(sequences, "mask"), dtype=torch.bool)
    loss, _ = policy_objective(
        name, logprobs=logprobs, old_logprobs=logprobs, advantages=torch.zeros(len(sequences)),
        cu_seqlens=torch.tensor([0, *(len(s["new"]) for s in sequences)]).cumsum(0), response_mask=mask,
        global_num_sequences=10, global_num_tokens=50, max_response_length=8, entropy=entropy, entropy_coef=0.5,
    )  # fmt: skip
    loss.backward()
    expected = []
    for s in sequences:
        n = max(sum(s["mask"]), 1)
        weight = {"luspo": 1 / 10, "gspo": 1 / (10 * n), "grpo": 1 / (10 * n), "drgrpo": 1 / 80}.get(name, 1 / 50)
        expected += [-0.5 * weight * m for m in s["mask"]]
    assert_close(entropy.grad, expected, 1e-14)


@pytest.mark.parametrize("name", [n for n in NAMES if n != "cispo"])  # cispo's surrogate is not its value's gradient
def test_gradcheck(name):
    case = golden_sequences(CASES["C"])
    mask = torch.tensor(flat(case, "mask"), dtype=torch.bool)
    old = torch.tensor(flat(case, "old"), dtype=torch.float64)
    cu = torch.tensor([0, *(len(s["new"]) for s in case)]).cumsum(0)
    advantages = torch.tensor([s["advantage"] for s in case], dtype=torch.float64)

    def loss(logprobs, entropy):
        return policy_objective(
            name, logprobs=logprobs, old_logprobs=old, advantages=advantages, cu_seqlens=cu, response_mask=mask,
            clip_low=0.2, clip_high=0.28, global_num_sequences=6, global_num_tokens=19, max_response_length=8,
            ref_logprobs=old - 0.1, kl_coef=0.3, entropy=entropy, entropy_coef=0.2,
        )[0]  # fmt: skip

    logprobs = torch.tensor(flat(case, "new"), dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(loss, (logprobs, (-logprobs.detach()).requires_grad_()), atol=1e-8, rtol=1e-6)


def test_luspo_gradient_has_no_length_in_it():
    """On policy every response token gets -A_i / N, and LUSPO is GSPO times the length."""
    sequences = golden_sequences(CASES["A"])
    _, gradient, _ = run("luspo", sequences)
    assert_close(gradient, [-s["advantage"] / 4 for s in sequences for _ in s["new"]], 1e-14)
    off_policy = golden_sequences(CASES["C"])
    _, luspo, _ = run("luspo", off_policy, low=0.2, high=0.28)
    _, gspo, _ = run("gspo", off_policy, low=0.2, high=0.28)
    lengths = torch.tensor([sum(s["mask"]) for s in off_policy for _ in s["new"]], dtype=torch.float64)
    assert_close(luspo, gspo * lengths, 1e-14)


# ------------------------------------------------------------------------------------------- what must not matter


def with_padding(sequences, size):
    return [*sequences, {"new": [NAN] * size, "old": [INF] * size, "mask": [0] * size, "advantage": NAN}]


OFF = {"low": 0.004, "high": 0.005, "n_seq": 9, "n_tokens": 60, "kl_coef": 0.1, "entropy_coef": 0.05}


@property_test
@given(seed=st.integers(0, 10**6), size=st.integers(1, 40), name=st.sampled_from(NAMES))
def test_padding_sequences(seed, size, name):
    sequences = random_sequences(seed)
    loss, gradient, statistics = run(name, sequences, **OFF)
    padded_loss, padded_gradient, padded_statistics = run(name, with_padding(sequences, size), **OFF)
    assert_close(padded_loss, loss, 1e-12)
    assert_close(padded_gradient[:-size], gradient, 1e-12)
    assert not padded_gradient[-size:].any()
    for key in set(statistics) - set(PER_SEQUENCE):
        assert padded_statistics[key].item() == pytest.approx(statistics[key].item(), rel=1e-12), key


@property_test
@given(seed=st.integers(0, 10**6), order=st.permutations(range(8)), name=st.sampled_from(NAMES))
def test_permutation(seed, order, name):
    sequences = random_sequences(seed)
    loss, gradient, _ = run(name, sequences, **OFF)
    permuted_loss, permuted_gradient, _ = run(name, [sequences[i] for i in order], **OFF)
    parts = gradient.split([len(s["new"]) for s in sequences])
    assert_close(permuted_loss, loss, 1e-11)
    assert_close(permuted_gradient, torch.cat([parts[i] for i in order]), 1e-12)


@property_test
@given(seed=st.integers(0, 10**6), parts=st.sampled_from([1, 2, 4, 8]), name=st.sampled_from(NAMES))
def test_split_into_micro_batches(seed, parts, name):
    """Field case 3: losses, gradients and statistics of the parts add up, whatever the split (and so for any DP)."""
    sequences = random_sequences(seed)
    loss, gradient, statistics = run(name, sequences, **OFF)
    size = 8 // parts
    pieces = [run(name, with_padding(sequences[i * size : (i + 1) * size], 1 + i), **OFF) for i in range(parts)]
    assert_close(sum(p[0] for p in pieces), loss, 1e-11)
    assert_close(torch.cat([p[1][: -1 - i] for i, p in enumerate(pieces)]), gradient, 1e-12)
    whole, split = reduce_statistics([statistics]), reduce_statistics([p[2] for p in pieces])
    assert whole.keys() == split.keys() and whole["kl_ref_mean"] > 1e-3
    for key in whole:
        assert split[key] == pytest.approx(whole[key], rel=1e-10, abs=1e-13), key


@property_test
@given(seed=st.integers(0, 10**6), garbage=st.sampled_from([NAN, INF, -INF, 1e30]), name=st.sampled_from(NAMES))
def test_anything_at_masked_positions(seed, garbage, name):
    """Field case 6: value, gradient and statistics are bitwise those without the garbage."""
    sequences = random_sequences(seed)
    poisoned = []
    for s in sequences:
        keys = ("new", "old", "ref", "entropy", "rollout_weight")
        bad = {k: [x if m else garbage for x, m in zip(s[k], s["mask"], strict=True)] for k in keys}
        poisoned.append(s | bad | ({} if any(s["mask"]) else {"advantage": garbage}))
    assert any(not any(s["mask"]) for s in poisoned)
    loss, gradient, statistics = run(name, sequences, **OFF)
    bad_loss, bad_gradient, bad_statistics = run(name, poisoned, **OFF)
    assert torch.equal(loss, bad_loss) and torch.equal(gradient, bad_gradient) and gradient.any()
    assert not gradient[~torch.tensor(flat(sequences, "mask"), dtype=torch.bool)].any()
    for key, value in statistics.items():
        assert torch.equal(value, bad_statistics[key]), key


@pytest.mark.parametrize("name", NAMES)
def test_all_masked_batch(name):
    """Field case 6: no 0/0, and a gradient (of zeros) so that a filler takes part in the backward pass."""
    sequences = [{"new": [NAN, -1.0], "old": [-1.0, NAN], "mask": [0, 0], "advantage": NAN}]
    loss, gradient, statistics = run(name, sequences, n_tokens=0)
    assert loss == 0 and gradient.tolist() == [0, 0]
    assert all(bool(torch.isfinite(x).all()) for x in statistics.values())
    assert statistics["seq_ratio"].tolist() == [1] and statistics["sequences"] == 0
    assert "clip_fraction_positive" not in reduce_statistics([statistics])


@pytest.mark.parametrize("name", NAMES)
def test_fully_masked_sample_is_no_token(name):
    """Field case 5: 4 tokens, not 5; the empty sample stays in N."""
    full = {"new": [-1.0] * 4, "old": [-1.0] * 4, "mask": [1] * 4, "advantage": 1.0}
    empty = {"new": [-2.0] * 4, "old": [-1.0] * 4, "mask": [0] * 4, "advantage": -1.0}
    loss, gradient, statistics = run(name, [full, empty], n_seq=2, n_tokens=4)
    alone, alone_gradient, _ = run(name, [full], n_seq=2, n_tokens=4)
    assert statistics["response_tokens"] == 4 and statistics["sequences"] == 1
    assert_close(loss, alone, 1e-15)
    assert_close(gradient[:4], alone_gradient, 1e-15)
    assert not gradient[4:].any()
    assert run(name, [full, empty], n_seq=4, n_tokens=8)[0] == loss / 2  # the denominators are the arguments


# ------------------------------------------------------------------------------------------------------ field cases


@pytest.mark.parametrize("pad_to", [8, 16])
def test_luspo_weight_is_exactly_the_length(pad_to):
    """Field case 1: lengths 2 and 8 with KL and rollout weights; the weight must not turn into L^2/T."""
    sequences = []
    for length, advantage in ((2, 1.0), (8, -0.5)):
        pad = pad_to - length
        sequences.append({
            "new": [-1.0] * length + [NAN] * pad, "old": [-1.0] * length + [NAN] * pad,
            "mask": [1] * length + [0] * pad, "advantage": advantage,
            "ref": [-1.2] * length + [NAN] * pad, "rollout_weight": [1.0] * length + [NAN] * pad,
        })  # fmt: skip
    loss, gradient, statistics = run("luspo", sequences, kl_coef=0.1)
    k3 = math.exp(-0.2) + 0.2 - 1
    assert_close(statistics["policy_loss"], -(2 * 1.0 + 8 * -0.5) / 2, 1e-14)
    assert_close(statistics["kl_loss"], 0.1 * 10 * k3 / 2, 1e-12)
    assert_close(loss, statistics["policy_loss"] + statistics["kl_loss"], 1e-15)
    on_kl = 0.1 * (1 - math.exp(-0.2)) / 2
    expected = [-0.5 + on_kl] * 2 + [0.0] * (pad_to - 2) + [0.25 + on_kl] * 8 + [0.0] * (pad_to - 8)
    assert_close(gradient, expected, 1e-13)
    halved = [s | {"rollout_weight": [w / 2 for w in s["rollout_weight"]]} for s in sequences]
    assert_close(run("luspo", halved, kl_coef=0.1)[2]["policy_loss"], 0.5, 1e-14)


@pytest.mark.parametrize(
    "name, expected", [("gspo", 0.0), ("luspo", 1.0), ("dapo", 0.5), ("grpo", 0.0), ("drgrpo", 2 / (2 * 8))]
)
def test_who_weighs_by_length(name, expected):
    """Field case 2: lengths 1 and 3, advantages +1 and -1, ratio 1."""
    short, long = ({"new": [-1.0] * n, "old": [-1.0] * n, "mask": [1] * n} for n in (1, 3))
    sequences = [short | {"advantage": 1.0}, long | {"advantage": -1.0}]
    loss, gradient, _ = run(name, sequences)
    assert loss.item() == pytest.approx(expected, abs=1e-15)
    assert gradient.abs().min() > 1e-3


@pytest.mark.parametrize("name", NAMES)
def test_temperature_of_both_sides(name):
    """Field case 19: engine and actor at the same temperature give ratio 1; raw log-probs would not."""
    logits = torch.tensor([2.0, -1.0, 0.5, 0.1], dtype=torch.float64)
    engine, actor, raw = ((logits / tau).log_softmax(-1)[2].item() for tau in (0.6, 0.6, 1.0))
    sequence = {"new": [actor], "old": [engine], "mask": [1], "advantage": 1.0}
    _, _, statistics = run(name, [sequence], low=0.2, high=0.28)
    assert statistics["seq_ratio"].item() == 1 and statistics["ratio_deviation"] == 0
    _, _, mismatch = run(name, [sequence | {"new": [raw]}], low=0.2, high=0.28)
    assert abs(mismatch["seq_ratio"].item() - 1) > 0.1


# ------------------------------------------------------------------------------------------------- numbers at the edge


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("log_ratio", [9.0, 11.0, 1e4, INF])
def test_ratio_overflow(name, log_ratio):
    """A < 0 with a huge ratio is not clipped by the minimum: bounded by e^10, without gradient, and counted."""
    wild = {"new": [-1.0, -1.0], "old": [-1.0 - log_ratio] * 2, "mask": [1, 1], "advantage": -1.0}
    tame = {"new": [-1.0], "old": [-1.0], "mask": [1], "advantage": 1.0}
    loss, gradient, statistics = run(name, [wild, tame], low=0.2, high=0.28)
    over = log_ratio > 10
    assert bool(torch.isfinite(loss)) and bool(torch.isfinite(gradient).all())
    assert statistics["overflow"] == over * (1 if OBJECTIVES[name].importance == "sequence" else 2)
    unbounded = {"kl_old"} if log_ratio == INF else set()  # the k3 of a token that had probability 0 is infinite
    assert all(bool(torch.isfinite(x).all()) for key, x in statistics.items() if key not in unbounded)
    if name == "cispo":  # its ratio is cut to 1 + clip_high and is no part of the gradient
        assert_close(gradient, [1.28 / 3, 1.28 / 3, -1 / 3], 1e-12)
    else:
        assert bool((gradient[:2] == 0).all()) == over and gradient[2] != 0
    if name == "luspo":
        assert_close(loss, (2 * math.exp(min(log_ratio, 10)) - 1) / 2, 1e-12)


def test_kl_overflow():
    sequence = {"new": [-50.0, -1.0], "old": [-50.0, -1.0], "mask": [1, 1], "advantage": 0.0, "ref": [-1.0, -1.5]}
    loss, gradient, statistics = run("luspo", [sequence], kl_coef=0.1)
    assert_close(loss, 0.1 * (math.exp(10) - 11 + math.exp(-0.5) - 0.5), 1e-12)
    assert gradient[0] == 0 and gradient[1] == pytest.approx(0.1 * (1 - math.exp(-0.5)), rel=1e-12)
    assert statistics["kl_overflow"] == 1


@pytest.mark.parametrize("name", NAMES)
def test_float32_inputs(name):
    """A long sequence behind a heavy one: float32 inputs, float64 sums; a running-sum difference would fail here."""
    generator = torch.Generator().manual_seed(1)
    sizes = (20000, 3, 512)
    sequences = []
    for size, advantage in zip(sizes, (1.0, -1.0, 0.7), strict=True):
        new = (-5 * torch.rand(size, generator=generator)).float()
        old = (new + 0.002 * torch.randn(size, generator=generator)).float()
        sequences.append({"new": new.tolist(), "old": old.tolist(), "mask": [1] * size, "advantage": advantage})
    low, high = (2e-3, 2.5e-3) if OBJECTIVES[name].importance == "sequence" else (0.2, 0.28)
    loss, gradient, statistics = run(name, sequences, low=low, high=high, dtype=torch.float32)
    exact, gradients = reference(name, sequences, low, high, 3, sum(sizes))
    assert loss.dtype == gradient.dtype == torch.float32
    assert_close(loss, -exact, 1e-7)
    assert_close(gradient, [-x for row in gradients for x in row], 1e-7)
    sums = [math.fsum(a - b for a, b in zip(s["new"], s["old"], strict=True)) for s in sequences]
    expected = [math.expm1(x / n) for x, n in zip(sums, sizes, strict=True)]
    assert_close(statistics["seq_ratio"] - 1, expected, 1e-9, floor=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_inputs_give_a_float32_loss(dtype):
    loss, gradient, _ = run("luspo", golden_sequences(CASES["A"]), dtype=dtype)
    assert loss.dtype == torch.float32 and gradient.dtype == dtype and gradient.abs().max() > 0.1


# ---------------------------------------------------------------------------------------------- statistics and plugs


def test_statistics_by_hand():
    """kl_old is k3 of old against new: e^d - d - 1 with d = old - new."""
    sequence = {"new": [-1.0, -2.0, 5.0], "old": [-1.1, -1.7, 9.0], "mask": [1, 1, 0], "advantage": 1.0}
    sequence["entropy"] = [1.0, 2.0, 7.0]
    _, _, statistics = run("dapo", [sequence], low=0.2, high=0.28)
    d = (-0.1, 0.3)
    assert statistics["kl_old"] == pytest.approx(sum(math.exp(x) - x - 1 for x in d), rel=1e-12)
    assert statistics["ratio"] == pytest.approx(math.exp(0.1) + math.exp(-0.3), rel=1e-12)
    assert statistics["ratio_deviation"] == pytest.approx(math.exp(0.1) - math.exp(-0.3), rel=1e-12)
    assert (statistics["entropy"], statistics["units"], statistics["response_tokens"]) == (3, 2, 2)
    high = run("dapo", [sequence | {"old": [-1.3, -1.7, 9.0]}], low=0.2, high=0.28)[2]
    assert high["clipped"].tolist() == [0.5] and high["clipped_positive"] == 1


def test_every_sum_has_a_declared_normaliser():
    _, _, statistics = run("luspo", random_sequences(1), **OFF)
    named = {key for pair in METRICS.values() for key in pair if key}
    assert set(statistics) - set(PER_SEQUENCE) == named
    assert all(not x.requires_grad and x.dtype == torch.float64 for x in statistics.values())


def doubled(**arguments):
    loss, statistics = policy_objective("luspo", **arguments)
    return 2 * loss, statistics


SUM_LUSPO = Objective("mine", "sequence", "min", "length", "tokens")


def test_module_attribute():
    sequences = golden_sequences(CASES["B"])
    plain = run("luspo", sequences)[1]
    assert_close(run(f"{__name__}:doubled", sequences)[1], 2 * plain, 1e-15)
    assert_close(run(f"{__name__}:SUM_LUSPO", sequences)[1], plain * 5 / 15, 1e-14)
    assert_close(run(SUM_LUSPO, sequences)[1], plain * 5 / 15, 1e-14)


@pytest.mark.parametrize("name", ["lupso", "no_such_module:x", "math:no_such", "math:pi", ":x"])
def test_unknown_objective(name):
    with pytest.raises(UserError, match="algorithm.objective"):
        resolve_objective(name)


def test_misfits_are_refused():
    good = {
        "logprobs": torch.zeros(4), "old_logprobs": torch.zeros(4), "advantages": torch.zeros(2),
        "cu_seqlens": torch.tensor([0, 2, 4]), "response_mask": torch.ones(4, dtype=torch.bool),
        "global_num_sequences": 2, "global_num_tokens": 4,
    }  # fmt: skip
    policy_objective("luspo", **good)
    bad = [
        {"cu_seqlens": torch.tensor([0, 2, 5])}, {"cu_seqlens": torch.tensor([1, 2, 4])},
        {"cu_seqlens": torch.tensor([0, 5, 4])}, {"advantages": torch.zeros(4)}, {"old_logprobs": torch.zeros(4, 1)},
        {"global_num_sequences": 0}, {"kl_coef": 0.1}, {"entropy_coef": 0.1}, {"ref_logprobs": torch.zeros(3)},
    ]  # fmt: skip
    for change in bad:
        with pytest.raises(ValueError):
            policy_objective("luspo", **good | change)
    with pytest.raises(ValueError, match="max_response_length"):
        policy_objective("drgrpo", **good)


def test_supervised_objective():
    logprobs = torch.tensor([-1.0, NAN, -3.0, -0.5], dtype=torch.float64, requires_grad=True)
    loss, statistics = supervised_objective(logprobs, torch.tensor([True, False, True, True]), 9)
    loss.backward()
    assert loss.item() == pytest.approx(4.5 / 9, rel=1e-15)
    assert_close(logprobs.grad, [-1 / 9, 0, -1 / 9, -1 / 9], 1e-15)
    assert statistics["response_tokens"] == 3 and statistics["loss"] == loss
    empty, _ = supervised_objective(torch.tensor([NAN], requires_grad=True), torch.tensor([False]), 0)
    assert empty == 0
