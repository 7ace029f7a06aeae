"""The demo's model and data scripts, run as a person runs them, and their output through the project's own readers."""

from __future__ import annotations

import importlib.util
import json
import random
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest

from luspo_megatron.config import DataConfig, RewardConfig, SftDataConfig
from luspo_megatron.data.demonstrations import load_demonstrations
from luspo_megatron.data.prompts import load_prompts, overlap
from luspo_megatron.data.tokenizer import TextTokenizer, load_tokenizer
from luspo_megatron.reward import RewardInput, RewardScorer

TINY = Path(__file__).resolve().parents[2] / "examples" / "qwen3_moe" / "tiny"
REWARD = RewardConfig(terms=("reasoning_gym:1.0",), answer_pattern=r">(-?\d+)$", binary=True)


def run(script: str, out: Path, *flags: str) -> str:
    command = [sys.executable, str(TINY / script), "--out", str(out), *flags]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def load(script: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(script.removesuffix(".py"), TINY / script)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("model")
    run("make_tiny_model.py", out, "--seed", "3")
    return out


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("data")
    run("make_data.py", out, "--seed", "3")
    return out


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> TextTokenizer:
    return load_tokenizer(model)


def rows(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_model_folder(model: Path, tokenizer: TextTokenizer) -> None:
    from safetensors import safe_open
    from transformers import AutoModelForCausalLM

    config = json.loads((model / "config.json").read_text())
    assert config["vocab_size"] == len(tokenizer.hf) == 80
    assert config["rope_parameters"]["rope_theta"] == 1e4 and config["num_hidden_layers"] % 4 == 0
    assert config["hidden_size"] != config["moe_intermediate_size"]
    generation = json.loads((model / "generation_config.json").read_text())
    assert generation["eos_token_id"] == config["eos_token_id"] == tokenizer.eos_id
    assert generation["pad_token_id"] == config["pad_token_id"] == tokenizer.pad_id != tokenizer.eos_id
    with safe_open(model / "model.safetensors", "pt") as tensors:
        names = set(tensors.keys())
    assert "lm_head.weight" in names and "model.layers.3.mlp.experts.7.down_proj.weight" in names
    loaded = AutoModelForCausalLM.from_pretrained(model)
    assert 0.9e6 < sum(parameter.numel() for parameter in loaded.parameters()) < 1.2e6


def test_model_depends_on_the_seed_alone(model: Path, tmp_path: Path) -> None:
    make = load("make_tiny_model.py").make_tiny_model
    make(tmp_path / "same", 3)
    assert (tmp_path / "same/model.safetensors").read_bytes() == (model / "model.safetensors").read_bytes()
    make(tmp_path / "other", 4)
    assert (tmp_path / "other/model.safetensors").read_bytes() != (model / "model.safetensors").read_bytes()


def test_tokenizer_is_one_token_per_character(tokenizer: TextTokenizer) -> None:
    characters = load("make_tiny_model.py").CHARACTERS
    draw = random.Random(0)
    for _ in range(200):
        text = "".join(draw.choices(characters, k=draw.randrange(40)))
        ids = tokenizer.encode(text)
        assert len(ids) == len(text) and tokenizer.decode(ids) == text and tokenizer.decode([*ids, 1]) == text
    assert tokenizer.encode("é") == [2], "unknown characters are one <unk>"
    assert tokenizer.encode("4 + 7") == tokenizer.encode("4", special=False) + tokenizer.encode(" + 7", special=False)


def test_held_out_prompts_are_never_trained_on(data: Path) -> None:
    demos, train, heldout = (rows(data / f"{name}.jsonl") for name in ("demos", "train", "heldout"))
    assert (len(demos), len(train), len(heldout)) == (24_000, 4_800, 1_000)
    prompts = [{row["prompt"] for row in part} for part in (demos, train, heldout)]
    assert len(prompts[1]) == 4_800 and len(prompts[2]) == 1_000, "distinct"
    assert not prompts[0] & prompts[2] and not prompts[1] & prompts[2] and not prompts[0] & prompts[1]
    for row in train + heldout:
        assert re.fullmatch(r"\d([+-]\d){1,3}=", row["prompt"]) and eval(row["prompt"][:-1]) == int(row["answer"])
    first, rest = heldout[:200], heldout[200:]
    share = [sum(len(row["prompt"]) == 8 for row in part) / len(part) for part in (first, rest)]
    assert abs(share[0] - share[1]) < 0.15, "the first rows are not easier than the rest"


def test_parts_do_not_depend_on_the_seed(data: Path, tmp_path: Path) -> None:
    run("make_data.py", tmp_path, "--seed", "4", "--demos", "2000", "--train", "500", "--heldout", "300")
    mine = {row["prompt"] for row in rows(data / "heldout.jsonl")}
    others = {row["prompt"] for name in ("demos", "train") for row in rows(tmp_path / f"{name}.jsonl")}
    assert not mine & others
    assert {row["prompt"] for row in rows(tmp_path / "heldout.jsonl")} != mine


def test_size_of_the_task_and_of_its_parts() -> None:
    """All expressions of 2 to 4 one-digit terms, counted: what the script's text says."""
    import itertools

    module = load("make_data.py")
    counts: Counter[tuple[int, str]] = Counter()
    for terms in (2, 3):  # the 80,000 of four terms follow the same rule
        for digits in itertools.product("0123456789", repeat=terms):
            for signs in itertools.product("+-", repeat=terms - 1):
                prompt = digits[0] + "".join(s + d for s, d in zip(signs, digits[1:], strict=True)) + "="
                counts[terms, module.part_of(prompt)] += 1
    assert sum(counts[2, part] for part in ("heldout", "demos", "train")) == 200
    assert sum(counts[3, part] for part in ("heldout", "demos", "train")) == 4_000
    assert 0.17 < counts[3, "heldout"] / 4_000 < 0.23 and 0.37 < counts[3, "train"] / 4_000 < 0.43


def test_demonstrations_are_noisy_as_stated(data: Path) -> None:
    demos = rows(data / "demos.jsonl")
    wrong = partial = 0
    for row in demos:
        match = re.fullmatch(r"((?:<-?\d+)*)>(-?\d+)", row["response"])
        assert match is not None, row
        difference = abs(int(match[2]) - eval(row["prompt"][:-1]))
        assert difference in (0, 1, 2)
        wrong += difference > 0
        if match[1]:
            partial += 1
            terms = re.findall(r"[+-]?\d+", row["prompt"])
            sums = [sum(map(int, terms[:n])) for n in range(2, len(terms) + 1)]
            assert [int(text) for text in match[1].split("<")[1:]] == sums
    assert abs(wrong / len(demos) - 0.4) < 0.02 and abs(partial / len(demos) - 0.5) < 0.02


def test_the_demo_reward_is_exact(data: Path, tokenizer: TextTokenizer) -> None:
    """1 when the text after the last ">" is the answer, else 0; on the prompts as the loop loads them."""
    config = DataConfig(
        prompts=str(data / "train.jsonl"), eval_prompts=str(data / "heldout.jsonl"), size=300, max_prompt_tokens=16
    )
    train, heldout = load_prompts(config, tokenizer), load_prompts(config, tokenizer, "eval")
    assert len(train) == 300 and train.filtered == heldout.filtered == 0 and overlap(train, heldout)[1] == 0
    scorer = RewardScorer(REWARD)
    for prompt in train:
        answer = int(prompt.row["answer"])
        right = (f">{answer}", f"<5<6>{answer}", f">1>{answer}")
        wrong = (f">{answer}<", f"{answer}", f">{answer + 1}", f">{answer}>", f">{answer}<unk>", f">1{answer}", "")
        cases = [(text, 1) for text in right] + [(text, 0) for text in wrong]
        cases += [(f">{-answer}", 0)] if answer else []
        for response, reward in cases:
            result = scorer.score(RewardInput(prompt.text, response, prompt.row))
            assert (result.reward, result.correct, result.failed) == (reward, bool(reward), None), (prompt, response)


def test_demonstrations_load(data: Path, tokenizer: TextTokenizer) -> None:
    found = load_demonstrations(SftDataConfig(path=str(data / "demos.jsonl"), max_tokens=64), tokenizer)
    assert len(found) == 24_000 and found.filtered == 0
    assert all(demonstration.response_ids[-1] == tokenizer.eos_id for demonstration in found)
    assert max(demonstration.num_tokens for demonstration in found) <= 8 + 3 * 4 + 4
