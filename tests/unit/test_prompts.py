"""Prompts, demonstrations and the tokenizer: every form they come in, and every mistake named."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from luspo_megatron.config import DataConfig, SftDataConfig
from luspo_megatron.data.demonstrations import load_demonstrations
from luspo_megatron.data.prompts import PromptStream, load_prompts, overlap, split_seed
from luspo_megatron.data.tokenizer import TextTokenizer, load_tokenizer
from luspo_megatron.errors import UserError
from luspo_megatron.types import Prompt

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
CHAT = [{"role": "system", "content": "add"}, {"role": "user", "content": "2+2="}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A character tokenizer, saved as an ordinary one."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = ["<pad>", "<eos>", "<unk>", *map(chr, range(32, 127)), "\n"]
    core = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    hf = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>", pad_token="<pad>", unk_token="<unk>")
    hf.chat_template = TEMPLATE
    path = tmp_path_factory.mktemp("tokenizer")
    hf.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> TextTokenizer:
    return load_tokenizer(folder)


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    if path.suffix == ".parquet":
        parquet.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture(params=["jsonl", "parquet"])
def file(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[list[dict[str, Any]]], str]:
    return lambda rows: write(tmp_path / f"rows.{request.param}", rows)


File = Callable[[list[dict[str, Any]]], str]


# --- forms of prompts ------------------------------------------------------------------------------------------------


def test_string_prompts(file: File, tokenizer: TextTokenizer) -> None:
    path = file([{"prompt": "2+2=", "answer": 4, "extra": "x"}, {"prompt": "1+1=", "answer": 2, "extra": None}])
    prompts = load_prompts(DataConfig(prompts=path), tokenizer)
    assert [prompt.text for prompt in prompts] == ["2+2=", "1+1="]
    assert [tokenizer.hf.decode(prompt.prompt_ids) for prompt in prompts] == ["2+2=", "1+1="]
    assert prompts[0].row == {"prompt": "2+2=", "answer": 4, "extra": "x"} and prompts.filtered == 0


def test_chat_list_prompts(file: File, tokenizer: TextTokenizer) -> None:
    """A chat list goes through the template even where string prompts do not."""
    prompts = load_prompts(DataConfig(prompts=file([{"prompt": CHAT, "answer": "4"}])), tokenizer)
    assert prompts[0].text == "<system>add<eos><user>2+2=<eos><assistant>"
    expected = tokenizer.hf.apply_chat_template(CHAT, add_generation_prompt=True, tokenize=True, return_dict=False)
    assert list(prompts[0].prompt_ids) == expected
    assert prompts[0].prompt_ids.count(tokenizer.eos_id) == 2
    json.dumps(prompts[0].row)


def test_chat_template_for_strings(file: File, tokenizer: TextTokenizer) -> None:
    config = DataConfig(prompts=file([{"prompt": "2+2=", "answer": "4"}]), chat_template=True)
    assert load_prompts(config, tokenizer)[0].text == "<user>2+2=<eos><assistant>"


def test_column_names_and_nested_columns(file: File, tokenizer: TextTokenizer) -> None:
    path = file([{"question": "2+2=", "reward_model": {"ground_truth": "4", "style": "rule"}}])
    config = DataConfig(prompts=path, prompt_key="question", answer_key="reward_model.ground_truth")
    prompt = load_prompts(config, tokenizer)[0]
    assert (prompt.text, prompt.row["answer"]) == ("2+2=", "4")
    with pytest.raises(UserError, match=r"reward_model.truth.*columns found: question, reward_model.*data.answer_key"):
        load_prompts(replace(config, answer_key="reward_model.truth"), tokenizer)


def test_over_long_prompts_are_counted_and_duplicates_kept(file: File, tokenizer: TextTokenizer) -> None:
    rows = [{"prompt": text, "answer": "0"} for text in ("1234567890", "12345678901", "1+1=", "1+1=")]
    config = DataConfig(prompts=file(rows), max_prompt_tokens=10)
    prompts = load_prompts(config, tokenizer)
    assert [prompt.text for prompt in prompts] == ["1234567890", "1+1=", "1+1="] and prompts.filtered == 1
    assert len({prompt.prompt_id for prompt in prompts}) == 3
    with pytest.raises(UserError, match="all 4 are longer than data.max_prompt_tokens=3"):
        load_prompts(replace(config, max_prompt_tokens=3), tokenizer)
    chats = [{"prompt": CHAT, "answer": "4"}, {"prompt": CHAT[1:], "answer": "4"}]
    assert load_prompts(DataConfig(prompts=file(chats), max_prompt_tokens=30), tokenizer).filtered == 1


def test_ids_are_stable_and_size_caps(file: File, tokenizer: TextTokenizer) -> None:
    path = file([{"prompt": f"{i}=", "answer": i} for i in range(9)])
    first, again = (load_prompts(DataConfig(prompts=path), tokenizer) for _ in range(2))
    assert [prompt.prompt_id for prompt in first] == [prompt.prompt_id for prompt in again]
    capped = load_prompts(DataConfig(prompts=path, size=4, eval_prompts=path, eval_size=2), tokenizer)
    assert capped == first[:4]
    assert load_prompts(DataConfig(eval_prompts=path, eval_size=2), tokenizer, "eval") == first[:2]


# --- mistakes --------------------------------------------------------------------------------------------------------


def test_wrong_columns_are_listed(file: File, tokenizer: TextTokenizer) -> None:
    path = file([{"question": "2+2=", "solution": "4"}])
    with pytest.raises(UserError, match=r"rows.* no column 'prompt'; columns found: question, solution.*prompt_key"):
        load_prompts(DataConfig(prompts=path), tokenizer)
    with pytest.raises(UserError, match=r"no column 'answer'; columns found: question, solution.*answer_key"):
        load_prompts(DataConfig(prompts=path, prompt_key="question"), tokenizer)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"prompt": "1", "answer": 1}\n{"prompt": \n', r"bad.jsonl:2: not valid JSON"),
        (b'{"prompt": "1", "answer": 1}\n\n[1, 2]\n', r"bad.jsonl:3: a line must be a JSON object.*list"),
        (b'{"prompt": "\xff"}\n', r"bad.jsonl:1: not valid JSON"),
        (b"\n\n", "no rows"),
        (b"", "no rows"),
        (b'{"prompt": "", "answer": 1}\n', r"bad.jsonl:1: the prompt is empty"),
        (b'{"prompt": null, "answer": 1}\n', r"bad.jsonl:1: the prompt must be a string"),
        (b'{"prompt": [], "answer": 1}\n', r"bad.jsonl:1: the prompt must be a string"),
        (b'{"prompt": [{"role": "user"}], "answer": 1}\n', r"bad.jsonl:1: a chat message is"),
        (b'{"prompt": ["2+2"], "answer": 1}\n', r"bad.jsonl:1: a chat message is"),
    ],
)
def test_malformed_jsonl(content: bytes, message: str, tmp_path: Path, tokenizer: TextTokenizer) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(content)
    with pytest.raises(UserError, match=message):
        load_prompts(DataConfig(prompts=str(path)), tokenizer)


def test_jsonl_with_byte_order_mark_and_blank_lines(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    path = tmp_path / "windows.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "1=", "answer": 1}\r\n\r\n{"prompt": "2=", "answer": 2}')
    assert [prompt.text for prompt in load_prompts(DataConfig(prompts=str(path)), tokenizer)] == ["1=", "2="]


def test_missing_and_unreadable_files(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    broken = tmp_path / "broken.parquet"
    broken.write_bytes(b"not parquet")
    text = tmp_path / "rows.csv"
    text.write_text("prompt,answer\n")
    for name, message in [
        (str(tmp_path / "none.jsonl"), "data.prompts: no such file"),
        (str(tmp_path / "none"), "data.prompts: no such file"),
        (str(broken), "not a readable parquet file"),
        (str(text), "must be a .jsonl or .parquet"),
        ("", "data.prompts is not set"),
        ("no_such_module_here:rows", "no_such_module_here"),
    ]:
        with pytest.raises(UserError, match=message):
            load_prompts(DataConfig(prompts=name), tokenizer)
    with pytest.raises(UserError, match="data.eval_prompts is not set"):
        load_prompts(DataConfig(prompts="x.jsonl"), tokenizer, "eval")


def test_no_chat_template(tmp_path: Path, folder: Path) -> None:
    bare = load_tokenizer(folder)
    bare.hf.chat_template = None
    path = write(tmp_path / "rows.jsonl", [{"prompt": CHAT, "answer": "4"}])
    with pytest.raises(UserError, match="no chat template"):
        load_prompts(DataConfig(prompts=path), bare)


# --- generated and plug-in sources -----------------------------------------------------------------------------------


def test_reasoning_gym_source(tokenizer: TextTokenizer) -> None:
    args = '{"min_terms": 2, "max_terms": 2, "min_digits": 3, "max_digits": 4}'
    name = "reasoning_gym:chain_sum"
    config = DataConfig(prompts=name, eval_prompts=name, task_args=args, size=200, eval_size=100)
    train, again = load_prompts(config, tokenizer, seed=1), load_prompts(config, tokenizer, seed=1)
    other, held_out = load_prompts(config, tokenizer, seed=2), load_prompts(config, tokenizer, "eval", seed=1)
    assert train == again and len(train) == 200 and len(held_out) == 100
    texts = [{prompt.text for prompt in part} for part in (train, other, held_out)]
    assert not texts[0] & texts[1] and not texts[0] & texts[2], "neighbouring seeds share no items"
    row = json.loads(json.dumps(train[0].row))
    assert row["task"] == "chain_sum" and row["task_args"] == json.loads(args) and row["metadata"]["num_terms"] == 2
    assert eval(row["metadata"]["expression"]) == int(row["answer"])


def test_every_reasoning_gym_row_is_plain_data(tokenizer: TextTokenizer) -> None:
    for task in ("word_ladder", "rearc", "graph_color", "sudoku", "time_intervals"):
        config = DataConfig(prompts=f"reasoning_gym:{task}", size=1, max_prompt_tokens=100_000)
        row = load_prompts(config, tokenizer)[0].row
        assert json.loads(json.dumps(row)) == row


@pytest.mark.parametrize(
    ("task", "args", "message"),
    [
        ("chain_sums", "{}", "no reasoning-gym task 'chain_sums'; did you mean .*chain_sum"),
        ("chain_sum", "{", "data.task_args"),
        ("chain_sum", "[1]", "not a JSON object"),
        ("chain_sum", '{"terms": 3}', "terms.*settings: .*min_terms"),
        ("chain_sum", '{"min_terms": 5, "max_terms": 2}', "max_terms must be"),
    ],
)
def test_reasoning_gym_mistakes(task: str, args: str, message: str, tokenizer: TextTokenizer) -> None:
    with pytest.raises(UserError, match=message):
        load_prompts(DataConfig(prompts=f"reasoning_gym:{task}", task_args=args, size=3), tokenizer)


def plugin_rows(config: DataConfig, tokenizer: TextTokenizer, split: str, seed: int) -> Iterator[dict[str, Any]]:
    """Rows as they come out of data frames: a numpy array of dicts, numpy scalars, bytes."""
    yield {"prompt": np.array(CHAT, dtype=object), "answer": np.int64(4), "split": split, "seed": seed}
    yield {"prompt": "1+1=", "answer": np.array([2, 3]), "image": b"\x00", "deep": {"a": (np.float32(0.5), None)}}


def plugin_text_row(*arguments: object) -> list[str]:
    return ["1+1="]


def test_plugin_source_and_numpy_prompts(tokenizer: TextTokenizer) -> None:
    config = DataConfig(prompts=f"{__name__}:plugin_rows")
    chat, text = load_prompts(config, tokenizer, seed=7)
    assert chat.text == "<system>add<eos><user>2+2=<eos><assistant>"
    assert (chat.row["answer"], chat.row["split"], chat.row["seed"]) == (4, "train", 7)
    assert json.loads(json.dumps(text.row))["deep"] == {"a": [0.5, None]}
    assert text.row["answer"] == [2, 3] and text.row["image"] == "AA=="
    with pytest.raises(UserError, match="must be a mapping"):
        load_prompts(DataConfig(prompts=f"{__name__}:plugin_text_row"), tokenizer)


# --- stream ----------------------------------------------------------------------------------------------------------


def numbered(count: int, name: str = "p") -> list[Prompt]:
    return [Prompt(f"{name}{i}", (i,), str(i)) for i in range(count)]


@settings(max_examples=60, deadline=None)
@given(
    count=st.integers(1, 12),
    seed=st.integers(0, 3),
    shuffle=st.booleans(),
    draws=st.lists(st.integers(0, 30), max_size=6),
    cut=st.integers(0, 6),
)
def test_resume_is_exact(count: int, seed: int, shuffle: bool, draws: list[int], cut: int) -> None:
    whole = PromptStream(numbered(count), seed, shuffle)
    expected = [whole.next(n) for n in draws]
    first = PromptStream(numbered(count), seed, shuffle)
    got = [first.next(n) for n in draws[:cut]]
    second = PromptStream(numbered(count), seed, shuffle)
    second.load_state(json.loads(json.dumps(first.state())))
    got += [second.next(n) for n in draws[cut:]]
    assert got == expected


def test_epochs_are_complete_and_differ() -> None:
    stream = PromptStream(numbered(50), seed=3)
    epochs = [[prompt.prompt_id for prompt in stream.next(50)] for _ in range(3)]
    assert all(sorted(epoch) == sorted(epochs[0]) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] and epochs[0] != sorted(epochs[0])
    other = [prompt.prompt_id for prompt in PromptStream(numbered(50), seed=4).next(50)]
    assert other not in epochs, "seed 4 is not seed 3 one epoch later"
    unshuffled = PromptStream(numbered(3), seed=3, shuffle=False)
    assert [prompt.text for prompt in unshuffled.next(7)] == list("0120120")


def test_resume_on_other_data_is_refused() -> None:
    state = PromptStream(numbered(5), 0).state()
    for other, key in [
        (PromptStream(numbered(6), 0), "prompts"),
        (PromptStream(numbered(5, "q"), 0), "fingerprint"),
        (PromptStream(numbered(5), 1), "seed"),
        (PromptStream(numbered(5), 0, shuffle=False), "shuffle"),
    ]:
        with pytest.raises(UserError, match=key):
            other.load_state(state)


def test_overlap_compares_token_ids() -> None:
    train = [Prompt("a", (1, 2), "x"), Prompt("b", (3,), "y"), Prompt("c", (1, 2), "x")]
    kept, removed = overlap(train, [Prompt("other id", (1, 2), "other text")])
    assert (kept, removed) == ([train[1]], 2)
    assert overlap(train, []) == (train, 0)


def test_split_seeds_are_far_apart() -> None:
    seeds = sorted(split_seed(seed, split) for seed in range(200) for split in ("train", "eval"))  # type: ignore[arg-type]
    assert min(b - a for a, b in zip(seeds, seeds[1:], strict=False)) > 10_000_000


# --- demonstrations --------------------------------------------------------------------------------------------------


def test_demonstrations(file: File, tokenizer: TextTokenizer) -> None:
    pairs = [("2+2=", ">4"), ("1=", ">1<eos>"), ("3=", "")]
    rows = [{"prompt": prompt, "response": response} for prompt, response in pairs]
    found = load_demonstrations(SftDataConfig(path=file(rows)), tokenizer)
    decode = tokenizer.hf.decode
    assert [decode(demonstration.prompt_ids) for demonstration in found] == ["2+2=", "1=", "3="]
    assert [decode(demonstration.response_ids) for demonstration in found] == [">4<eos>", ">1<eos>", "<eos>"]
    assert found[0].num_tokens == 7 and found.filtered == 0
    assert load_demonstrations(SftDataConfig(path=file(rows), max_tokens=5), tokenizer).filtered == 1


def test_demonstrations_of_chats_and_mistakes(file: File, tokenizer: TextTokenizer) -> None:
    path = file([{"chat": CHAT, "reply": "4"}])
    config = SftDataConfig(path=path, prompt_key="chat", response_key="reply")
    found = load_demonstrations(config, tokenizer)
    assert tokenizer.hf.decode(found[0].prompt_ids).endswith("<assistant>")
    with pytest.raises(UserError, match="no column 'response'; columns found: chat, reply.*data.response_key"):
        load_demonstrations(replace(config, response_key="response"), tokenizer)
    with pytest.raises(UserError, match="all 1 are longer than data.max_tokens=3"):
        load_demonstrations(replace(config, max_tokens=3), tokenizer)
    with pytest.raises(UserError, match="no such file"):
        load_demonstrations(SftDataConfig(path="none.jsonl"), tokenizer)
    with pytest.raises(UserError, match="not set"):
        load_demonstrations(SftDataConfig(), tokenizer)
    with pytest.raises(UserError, match="row 1|:1: the response must be a text"):
        load_demonstrations(SftDataConfig(path=file([{"prompt": "1=", "response": 1}])), tokenizer)


# --- tokenizer -------------------------------------------------------------------------------------------------------


def test_decode_keeps_all_but_the_closing_eos(tokenizer: TextTokenizer) -> None:
    ids = tokenizer.encode(">9", special=False)
    assert tokenizer.decode([*ids, tokenizer.eos_id]) == ">9" == tokenizer.decode(ids)
    assert tokenizer.decode([*ids, 0, tokenizer.eos_id]) == ">9<pad>", "a sampled special token is seen by the reward"
    assert tokenizer.decode([]) == ""
    text = "a  b\n c ."
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_eos_ids_from_all_three_places(tmp_path: Path, folder: Path) -> None:
    for name, content in [
        ("generation_config.json", {"eos_token_id": [7, 1], "pad_token_id": 5}),
        ("config.json", {"model_type": "qwen3", "eos_token_id": 9}),
    ]:
        (tmp_path / name).write_text(json.dumps(content))
    loaded = load_tokenizer(folder, tmp_path)
    assert (loaded.eos_ids, loaded.eos_id, loaded.pad_id) == ((1, 7, 9), 1, 0)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match="config.json is not valid JSON"):
        load_tokenizer(folder, tmp_path)


def test_tokenizer_mistakes(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(UserError, match="does not exist"):
        load_tokenizer(tmp_path / "none")
    with pytest.raises(UserError, match="holds no tokenizer"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(UserError, match="cannot read the tokenizer"):
        load_tokenizer(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        content = json.loads((folder / name).read_text())
        content.pop("eos_token", None)
        (tmp_path / name).write_text(json.dumps(content))
    with pytest.raises(UserError, match="eos"):
        load_tokenizer(tmp_path)
