"""The real Qwen3 tokenizer: chat prompts with and without thinking, its two eos ids, and token ids kept as sampled.

The expected ids and texts are Qwen3's published special tokens and template, written out. The engine is the embedded
one with a model of Qwen3's vocabulary whose head is made to say certain tokens.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from luspo_megatron.config import Config, DataConfig, ModelConfig, RewardConfig, RolloutConfig, RunConfig, SftDataConfig
from luspo_megatron.data.collate import pack
from luspo_megatron.data.demonstrations import load_demonstrations
from luspo_megatron.data.prompts import load_prompts
from luspo_megatron.data.tokenizer import load_tokenizer
from luspo_megatron.errors import UserError
from luspo_megatron.rollout.controller import Controller
from luspo_megatron.rollout.wire import group_from_dict
from tests.qwen3_tokenizer import fetch

IM_START, IM_END, END_OF_TEXT, THINK, THINK_END = 151644, 151645, 151643, 151667, 151668
NEWLINE, BLANK_LINE, USER, ASSISTANT = 198, 271, 872, 77091
QUESTION = "What is 2+2?"
QUESTION_IDS = (3838, 374, 220, 17, 10, 17, 30)
TURN = (IM_START, USER, NEWLINE, *QUESTION_IDS, IM_END, NEWLINE, IM_START, ASSISTANT, NEWLINE)
# what the model says to two prompts; "hel" and "lo" are not how the tokenizer cuts " hello"
HELLO, TWELVE = (11338, 385, IM_END), (16, 17, END_OF_TEXT)


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fetch(tmp_path_factory.mktemp("qwen3"))


@pytest.fixture(scope="module")
def model(qwen3: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A one-layer Qwen3 with the two eos ids in its generation_config.json, and the tokenizer beside it."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    network = Qwen3ForCausalLM(Qwen3Config(
        vocab_size=151936, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, max_position_embeddings=128, initializer_range=0.5, eos_token_id=IM_END,
        bos_token_id=None, pad_token_id=END_OF_TEXT, tie_word_embeddings=False))
    network.generation_config.eos_token_id = [IM_END, END_OF_TEXT]
    with torch.no_grad():
        head = network.lm_head.weight.zero_()
        for prompt, response in (((*TURN,), HELLO), (TURN[:-3] + (IM_START, ASSISTANT), TWELVE)):
            ids = torch.tensor([[*prompt, *response[:-1]]])
            states = network.model(ids).last_hidden_state[0, len(prompt) - 1 :]  # all of one norm
            for token, state in zip(response, states, strict=True):
                head[token] = 1000 * state
    folder = tmp_path_factory.mktemp("model")
    network.save_pretrained(folder)
    for file in qwen3.iterdir():
        shutil.copy(file, folder)
    return folder


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


CHAT = [{"role": "user", "content": QUESTION}]


@pytest.mark.parametrize(("args", "tail"), [
    ("{}", ()), ('{"enable_thinking": true}', ()),
    ('{"enable_thinking": false}', (THINK, BLANK_LINE, THINK_END, BLANK_LINE))])
def test_chat_prompts_with_and_without_thinking(args: str, tail: tuple[int, ...], qwen3: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(qwen3)
    path = write(tmp_path / "rows.jsonl", [{"prompt": CHAT, "answer": "4"}, {"prompt": QUESTION, "answer": "4"}])
    config = DataConfig(prompts=path, chat_template=True, chat_template_args=args)
    for prompt in load_prompts(config, tokenizer):  # a chat list, and a string as one user turn
        assert prompt.prompt_ids == TURN + tail
        thinking = "<think>\n\n</think>\n\n" if tail else ""
        assert prompt.text == f"<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n{thinking}"
    plain = load_prompts(DataConfig(prompts=path), tokenizer)
    assert plain[0].prompt_ids == TURN and plain[1].prompt_ids == QUESTION_IDS  # no BOS


def test_earlier_thoughts_are_left_out_of_the_prompt(qwen3: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(qwen3)
    chat = [{"role": "system", "content": "Add."}, *CHAT,
            {"role": "assistant", "content": "<think>\n2 and 2\n</think>\n\n4"}, {"role": "user", "content": "And 3?"}]
    path = write(tmp_path / "rows.jsonl", [{"prompt": chat, "answer": "7"}])
    [prompt] = load_prompts(DataConfig(prompts=path), tokenizer)
    assert prompt.text == ("<|im_start|>system\nAdd.<|im_end|>\n<|im_start|>user\nWhat is 2+2?<|im_end|>\n"
                           "<|im_start|>assistant\n4<|im_end|>\n<|im_start|>user\nAnd 3?<|im_end|>\n"
                           "<|im_start|>assistant\n")
    assert THINK not in prompt.prompt_ids and prompt.prompt_ids.count(IM_END) == 4


def test_a_switch_that_the_template_does_not_know(qwen3: Path, tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", [{"prompt": CHAT, "answer": "4"}])
    config = DataConfig(prompts=path, chat_template_args='{"enable_thinkin": false, "think_mode": 1}')
    with pytest.raises(UserError, match="does not know think_mode"):
        load_prompts(config, load_tokenizer(qwen3))


def test_the_two_eos_ids_and_the_pad_id(model: Path) -> None:
    tokenizer = load_tokenizer(model)
    assert tokenizer.eos_ids == (IM_END, END_OF_TEXT) and tokenizer.pad_id == END_OF_TEXT


def test_demonstrations_close_with_one_eos(model: Path, tmp_path: Path) -> None:
    rows = [{"prompt": CHAT, "response": text} for text in ("4", "4<|im_end|>", "4<|endoftext|>")]
    config = SftDataConfig(path=write(tmp_path / "rows.jsonl", rows), chat_template_args='{"enable_thinking": false}')
    found = load_demonstrations(config, load_tokenizer(model))
    assert [d.response_ids for d in found] == [(19, IM_END), (19, IM_END), (19, END_OF_TEXT)]
    assert all(d.prompt_ids == (*TURN, THINK, BLANK_LINE, THINK_END, BLANK_LINE) for d in found)


def rollout(model: Path, tmp_path: Path) -> list[Any]:
    """One group per prompt from controller, embedded engine and reward worker."""
    prompts = write(tmp_path / "rows.jsonl", [
        {"prompt": f"<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant{end}", "answer": "12"}
        for end in ("\n", "")])
    config = Config(
        run=RunConfig(dir=str(tmp_path)), model=ModelConfig(hf=str(model)),
        data=DataConfig(prompts=prompts, shuffle=False), reward=RewardConfig(terms=("math:1.0",)),
        rollout=RolloutConfig(prompts_per_step=2, group_size=2, max_response_tokens=6))

    async def run() -> list[Any]:
        controller = await Controller.build(config, tmp_path)
        try:
            return [group_from_dict(group) for group in (await controller.next_batch(1))["groups"]]
        finally:
            await controller.close()

    return asyncio.run(run())


def test_either_eos_ends_a_response_and_ids_stay_as_sampled(model: Path, tmp_path: Path) -> None:
    groups = rollout(model, tmp_path)
    for group, response, text in zip(groups, (HELLO, TWELVE), (" hello", "12"), strict=True):
        for sample in group.samples:
            assert tuple(sample.response_ids) == response
            assert sample.finish_reason == "stop" and not sample.truncated
            assert sample.response_text == text  # without the eos that ends it
            assert tuple(sample.prompt_ids) == group.prompt.prompt_ids
    tokenizer = load_tokenizer(model)
    assert tokenizer.encode(" hello") != [*HELLO[:-1]]  # text would have lost what was sampled
    sample = groups[0].samples[0]
    micro = pack([sample], [0], 1)
    np.testing.assert_array_equal(micro.token_ids[: sample.num_tokens], [*TURN, *HELLO])


def test_with_one_eos_id_only_the_other_one_is_truncated(model: Path, tmp_path: Path) -> None:
    """Shows that the test above can fail: without generation_config.json nothing names <|endoftext|> as an end."""
    folder = tmp_path / "model"
    shutil.copytree(model, folder)
    (folder / "generation_config.json").unlink()
    hello, twelve = rollout(folder, tmp_path)
    assert not hello.samples[0].truncated
    assert twelve.samples[0].truncated and tuple(twelve.samples[0].response_ids[:3]) == TWELVE
