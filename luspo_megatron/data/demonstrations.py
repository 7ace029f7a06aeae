"""Demonstrations for the supervised cold start: prompt and response pairs as token ids, the response closed by eos."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from luspo_megatron.config import SftDataConfig
from luspo_megatron.data.prompts import json_object, render_prompt
from luspo_megatron.data.records import column, read_records
from luspo_megatron.data.tokenizer import TextTokenizer
from luspo_megatron.errors import UserError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Demonstration:
    """One pair; the loss is on ``response_ids`` alone, whose last id is the eos."""

    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.response_ids)


class Demonstrations(list[Demonstration]):
    """A list of demonstrations that knows how many over-long ones were left out."""

    filtered: int = 0


def load_demonstrations(config: SftDataConfig, tokenizer: TextTokenizer) -> Demonstrations:
    """Every demonstration of ``data.path`` in file order. Raises UserError for a bad file, row or column."""
    if not config.path:
        raise UserError("data.path is not set; give a .jsonl or .parquet file of demonstrations")
    template_args = json_object(config.chat_template_args, "data.chat_template_args")
    out = Demonstrations()
    for record in read_records(config.path, "data.path"):
        prompt = column(record, config.prompt_key, f"data.prompt_key (now {config.prompt_key!r})")
        response = column(record, config.response_key, f"data.response_key (now {config.response_key!r})")
        if not isinstance(response, str):
            raise UserError(f"{record.where}: the response must be a text, this is {str(response)[:80]!r}")
        _, prompt_ids = render_prompt(prompt, tokenizer, chat_template=False, where=record.where,
                                      template_args=template_args)
        response_ids = tokenizer.encode(response, special=False)
        if not response_ids or response_ids[-1] not in tokenizer.eos_ids:
            response_ids.append(tokenizer.eos_id)
        demonstration = Demonstration(tuple(prompt_ids), tuple(response_ids))
        if demonstration.num_tokens > config.max_tokens:
            out.filtered += 1
        else:
            out.append(demonstration)
    if out.filtered:
        logger.warning(
            "%s: %d demonstrations longer than data.max_tokens=%d were left out, %d kept",
            config.path, out.filtered, config.max_tokens, len(out),
        )
    if not out:
        what = f"all {out.filtered} are longer than data.max_tokens={config.max_tokens}; raise it"
        raise UserError(f"{config.path}: no demonstration left: {what if out.filtered else 'the file is empty'}")
    return out
