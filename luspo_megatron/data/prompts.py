"""Prompts: from a file, a reasoning-gym task or a person's own source to tokenized Prompts; endless epochs over them.

``load_prompts`` reads everything once (prompts are small); ``PromptStream`` (stream.py) deals them out. Left out:
packing, padding and anything about responses.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import logging
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any, Literal, Protocol

import numpy as np

from luspo_megatron.config import DataConfig
from luspo_megatron.data.records import Record, column, plain, read_records
from luspo_megatron.data.stream import PromptStream, overlap
from luspo_megatron.data.tokenizer import TextTokenizer
from luspo_megatron.errors import UserError
from luspo_megatron.plugin import is_plugin_name, load_plugin
from luspo_megatron.types import Prompt

__all__ = ["PromptSource", "PromptStream", "Prompts", "load_prompts", "overlap", "render_prompt"]

logger = logging.getLogger(__name__)

Split = Literal["train", "eval"]
GENERATED_SIZE = 10_000


class PromptSource(Protocol):
    """Where prompts come from. Each row has the columns that ``data.prompt_key`` and ``data.answer_key`` name."""

    def records(self) -> Iterator[Record]:
        """The rows, in an order that depends on nothing but the source's own arguments."""
        ...


class Prompts(list[Prompt]):
    """A list of prompts that knows how many over-long ones were left out."""

    filtered: int = 0


class FileSource:
    """A .jsonl or .parquet file."""

    def __init__(self, path: str, flag: str) -> None:
        self.path, self.flag = path, flag

    def records(self) -> Iterator[Record]:
        return read_records(self.path, self.flag)


class ReasoningGymSource:
    """A reasoning-gym task: rows keep the entry, the task's name and arguments, which is what its scorer needs."""

    def __init__(self, task: str, task_args: str, size: int, seed: int) -> None:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS

        if task not in DATASETS:
            near = difflib.get_close_matches(task, DATASETS, n=3) or sorted(DATASETS)
            raise UserError(f"data.prompts: no reasoning-gym task {task!r}; did you mean {', '.join(near)}?")
        self.arguments = json_object(task_args, "data.task_args")
        self.task = task
        try:
            self.dataset = reasoning_gym.create_dataset(task, **{"size": size, "seed": seed, **self.arguments})
        except (TypeError, AssertionError, ValueError) as error:
            fields = ", ".join(DATASETS[task][1].__dataclass_fields__)
            raise UserError(f"data.task_args={task_args!r} does not suit {task}: {error}; settings: {fields}") from None

    def records(self) -> Iterator[Record]:
        for index in range(len(self.dataset)):
            entry = self.dataset[index]
            row = {**entry, "task": self.task, "task_args": self.arguments}
            yield Record(f"reasoning_gym:{self.task} item {index}", row)


class PluginSource:
    """``module:attribute``: a callable(data config, tokenizer, split, seed) that gives rows with prompt and answer."""

    def __init__(self, name: str, config: DataConfig, tokenizer: TextTokenizer, split: Split, seed: int) -> None:
        self.name, self.function = name, load_plugin(name, "data.prompts")
        self.arguments = (config, tokenizer, split, seed)

    def records(self) -> Iterator[Record]:
        for index, row in enumerate(self.function(*self.arguments)):
            if not isinstance(row, Mapping):
                raise UserError(f"{self.name} item {index}: a row must be a mapping, this is a {type(row).__name__}")
            yield Record(f"{self.name} item {index}", row)


def split_seed(seed: int, split: Split) -> int:
    """The seed of a generated split. Task generators give item i the seed ``seed + i``, so two seeds that lie close
    would share almost all items: these lie far apart."""
    return int.from_bytes(hashlib.blake2b(f"{split}:{seed}".encode(), digest_size=6).digest())


def open_source(
    config: DataConfig, tokenizer: TextTokenizer, split: Split, seed: int
) -> tuple[PromptSource, str, str]:
    """(source, prompt column, answer column) of a split. Raises UserError."""
    flag = "data.prompts" if split == "train" else "data.eval_prompts"
    name = config.prompts if split == "train" else config.eval_prompts
    size = config.size if split == "train" else config.eval_size
    if not name:
        raise UserError(f"{flag} is not set; give a .jsonl or .parquet file, reasoning_gym:TASK, or module:attribute")
    if name.startswith("reasoning_gym:"):
        task = name.removeprefix("reasoning_gym:")
        source = ReasoningGymSource(task, config.task_args, size or GENERATED_SIZE, split_seed(seed, split))
        return source, "question", "answer"
    if name.endswith((".jsonl", ".parquet")) or not is_plugin_name(name):
        return FileSource(name, flag), config.prompt_key, config.answer_key
    return PluginSource(name, config, tokenizer, split, seed), "prompt", "answer"


def render_prompt(
    prompt: Any, tokenizer: TextTokenizer, *, chat_template: bool, where: str,
    template_args: Mapping[str, Any] | None = None,
) -> tuple[str, list[int]]:
    """(text, ids) of a prompt: a string (as it is, or as one user turn) or a chat list. Raises UserError."""
    if isinstance(prompt, np.ndarray):
        prompt = prompt.tolist()
    if isinstance(prompt, str):
        if not prompt:
            raise UserError(f"{where}: the prompt is empty; remove the row")
        if not chat_template:
            return prompt, tokenizer.encode(prompt)
        prompt = [{"role": "user", "content": prompt}]
    if not isinstance(prompt, list | tuple) or not prompt:
        raise UserError(f"{where}: the prompt must be a string or a non-empty chat list, this is {_short(prompt)}")
    for message in prompt:
        if not isinstance(message, Mapping) or not all(isinstance(message.get(k), str) for k in ("role", "content")):
            raise UserError(f"{where}: a chat message is {{role, content}} with texts, this is {_short(message)}")
    return tokenizer.render_chat(prompt, template_args)


def json_object(text: str, flag: str) -> dict[str, Any]:
    """The JSON object that a flag holds. Raises UserError."""
    try:
        found = json.loads(text or "{}")
    except ValueError as error:
        raise UserError(f"{flag}={text!r}: {error}; write a JSON object") from None
    if not isinstance(found, dict):
        raise UserError(f"{flag}={text!r}: not a JSON object; write a JSON object")
    return found


def _short(value: Any) -> str:
    return repr(str(value)[:80])


def load_prompts(config: DataConfig, tokenizer: TextTokenizer, split: Split = "train", seed: int = 0) -> Prompts:
    """Every prompt of a split, tokenized, in the source's order; duplicates are kept.

    ``prompt_id`` is the row's index in the source and a digest of its prompt and answer: the same in every run.
    Over-long prompts are left out and counted in ``.filtered``. Raises UserError when nothing is left.
    """
    source, prompt_key, answer_key = open_source(config, tokenizer, split, seed)
    size = config.size if split == "train" else config.eval_size
    template_args = json_object(config.chat_template_args, "data.chat_template_args")
    prompts = Prompts()
    for index, record in enumerate(islice(source.records(), size or None)):
        prompt = column(record, prompt_key, f"data.prompt_key (now {prompt_key!r})")
        answer = column(record, answer_key, f"data.answer_key (now {answer_key!r})")
        text, ids = render_prompt(prompt, tokenizer, chat_template=config.chat_template, where=record.where,
                                  template_args=template_args)
        if len(ids) > config.max_prompt_tokens:
            prompts.filtered += 1
            continue
        row = {**plain(record.row), "answer": plain(answer)}
        digest = hashlib.blake2b(json.dumps([ids, row["answer"]]).encode(), digest_size=6).hexdigest()
        prompts.append(Prompt(f"{index}-{digest}", tuple(ids), text, row))
    name = config.prompts if split == "train" else config.eval_prompts
    if prompts.filtered:
        logger.warning(
            "%s: %d prompts longer than data.max_prompt_tokens=%d were left out, %d kept",
            name, prompts.filtered, config.max_prompt_tokens, len(prompts),
        )
    if not prompts:
        limit = f"data.max_prompt_tokens={config.max_prompt_tokens}"
        what = f"all {prompts.filtered} are longer than {limit}; raise it" if prompts.filtered else "it has no rows"
        raise UserError(f"{name}: no prompt left: {what}")
    return prompts
