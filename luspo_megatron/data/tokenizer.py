"""TextTokenizer: a Hugging Face tokenizer with the ids that end a response, and no silent habits.

``decode`` keeps every token it is given but the closing eos: a special token sampled in the middle of a response is
visible to the reward. Never used to make training tokens out of a response: rollout token ids are authoritative.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from luspo_megatron.errors import UserError

_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")


@dataclass(frozen=True)
class TextTokenizer:
    """``eos_ids``: every id that ends a response; the first is the one that demonstrations are closed with."""

    hf: Any
    folder: str
    eos_ids: tuple[int, ...]
    pad_id: int

    @property
    def eos_id(self) -> int:
        return self.eos_ids[0]

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Token ids. ``special`` adds what the tokenizer puts around a text (a BOS); never for responses."""
        return [int(i) for i in self.hf.encode(text, add_special_tokens=special)]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of a response, without the eos token at its end and with everything else."""
        end = len(ids) - 1 if len(ids) and ids[-1] in self.eos_ids else len(ids)
        text: str = self.hf.decode(list(ids[:end]), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

    def render_chat(self, messages: Sequence[Mapping[str, Any]], template_args: Mapping[str, Any] | None = None
                    ) -> tuple[str, list[int]]:
        """(text, ids) of a conversation through the chat template, open for the assistant. Raises UserError.

        ``template_args`` are the template's own switches, such as Qwen3's enable_thinking.
        """
        if not self.hf.chat_template:
            raise UserError(
                f"the tokenizer in {self.folder} has no chat template; use plain string prompts with "
                "data.chat_template=false, or a tokenizer that has one (model.tokenizer)"
            )
        if unknown := [name for name in template_args or () if name not in str(self.hf.chat_template)]:
            raise UserError(f"data.chat_template_args: the chat template in {self.folder} does not know "
                            f"{', '.join(unknown)}")
        text: str = self.hf.apply_chat_template(
            [dict(m) for m in messages], **{**(template_args or {}), "add_generation_prompt": True, "tokenize": False})
        return text, self.encode(text, special=False)  # the template wrote the special tokens already


def load_tokenizer(folder: str | Path, model_folder: str | Path | None = None) -> TextTokenizer:
    """The tokenizer in ``folder``; eos ids also from the generation_config.json and config.json of the model's folder.

    Raises UserError for a missing folder, missing or broken files, or when nothing says how a response ends.
    """
    path = Path(folder)
    if not path.is_dir():
        raise UserError(f"tokenizer folder {str(path)!r} does not exist; set model.hf or model.tokenizer to a folder")
    if not any((path / name).exists() for name in _FILES):
        raise UserError(f"{path} holds no tokenizer (none of {', '.join(_FILES)}); set model.tokenizer")
    from transformers import AutoTokenizer  # seconds to import; only the controller and the tools need it

    try:
        hf = AutoTokenizer.from_pretrained(str(path), local_files_only=True)
    except Exception as error:
        raise UserError(f"cannot read the tokenizer in {path}: {type(error).__name__}: {error}") from error
    model_path = Path(model_folder) if model_folder else path
    generation, model = (_read_json(model_path / name) for name in ("generation_config.json", "config.json"))
    eos = _unique([hf.eos_token_id, generation.get("eos_token_id"), model.get("eos_token_id")])
    if not eos:
        raise UserError(f"neither the tokenizer in {path} nor the configs in {model_path} name an eos token; add one")
    pad = _unique([hf.pad_token_id, generation.get("pad_token_id"), model.get("pad_token_id")])
    return TextTokenizer(hf, str(path), eos, pad[0] if pad else eos[0])


def _unique(candidates: Iterable[int | list[int] | None]) -> tuple[int, ...]:
    """Ids in the order found, once each; a candidate may be None, an id or a list of ids."""
    found: dict[int, None] = {}
    for candidate in candidates:
        for one in candidate if isinstance(candidate, list) else [candidate]:
            if one is not None:
                found[int(one)] = None
    return tuple(found)


def _read_json(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path} is not valid JSON: {error}; fetch it anew") from None
    if not isinstance(content, dict):
        raise UserError(f"{path} does not hold a JSON object; fetch it anew")
    return content
