"""What is looked at before any process is started, so that bad input costs seconds and leaves no trace.

The configuration itself has been checked (config_checks.py); here the files that it names are opened: names and shapes
of the weights, the columns of the first row of data, what the run folder holds. Left out: all that needs the tokenizer
or a person's own modules; the controller reads those before a run writes anything but logs.
"""

from __future__ import annotations

import os
from pathlib import Path

from luspo_megatron.config import Config, EvalCommandConfig, ModelConfig, SftConfig
from luspo_megatron.data.records import column, read_records
from luspo_megatron.errors import UserError
from luspo_megatron.run import resume_from
from luspo_megatron.weights.architecture import read_architecture


def check_train(config: Config) -> None:
    """UserError for what would stop `luspo train` after its start."""
    check_run_folder(config.run.dir, config.run.resume)
    data = config.data
    for flag, path in (("data.prompts", data.prompts), ("data.eval_prompts", data.eval_prompts)):
        _first_row(flag, path, {"data.prompt_key": data.prompt_key, "data.answer_key": data.answer_key})
    check_start(config.model)
    if config.algorithm.kl_coef > 0 and config.model.ref_hf:
        check_reference(config.model)
        check_weights(config.model.ref_hf, config.model.family)


def check_sft(config: SftConfig) -> None:
    """The same for `luspo sft`."""
    check_run_folder(config.run.dir, config.run.resume)
    data = config.data
    _first_row("data.path", data.path, {"data.prompt_key": data.prompt_key, "data.response_key": data.response_key})
    check_start(config.model)


def check_eval(config: EvalCommandConfig) -> None:
    """The same for `luspo eval`; `config.model` names the folder that engines start from."""
    data = config.data
    _first_row("data.eval_prompts", data.eval_prompts,
               {"data.prompt_key": data.prompt_key, "data.answer_key": data.answer_key})
    check_weights(config.model.hf, config.model.family)


def check_run_folder(run_dir: str, resume: bool) -> None:
    """A folder that can be written, or made, and whose checkpoints (if any) are to be gone on from."""
    path = Path(run_dir)
    nearest = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK):
        what = "cannot be written" if nearest.is_dir() else "is not a folder"
        raise UserError(f"run.dir {run_dir}: {nearest} {what}; take another one")
    resume_from(run_dir, resume)


def check_start(model: ModelConfig) -> None:
    """The weights that engines and the actor start from. A Megatron checkpoint's tensors are checked when loaded."""
    check_weights(model.hf, model.family)
    if model.megatron:
        from luspo_megatron.actor.checkpoint import dist_folder

        dist_folder(model.megatron)


def check_weights(folder: str, family: str = "") -> None:
    """The safetensors of `folder` hold exactly the tensors that its config.json asks for."""
    from luspo_megatron.weights.load import HfCheckpoint
    from luspo_megatron.weights.table import WeightTable

    HfCheckpoint(folder).check(WeightTable(read_architecture(folder, family)))


def check_reference(model: ModelConfig) -> None:
    """The reference policy is run by a model built like the actor."""
    ours, theirs = (vars(read_architecture(folder, model.family)) for folder in (model.hf, model.ref_hf))
    if differing := [f"{key} {theirs[key]} instead of {ours[key]}" for key in ours if ours[key] != theirs[key]]:
        raise UserError(f"model.ref_hf {model.ref_hf} is built unlike model.hf: {', '.join(differing)}; take a "
                        "reference policy of the same architecture")


def _first_row(flag: str, path: str, columns: dict[str, str]) -> None:
    if not path.endswith((".jsonl", ".parquet")):
        return
    first = next(read_records(path, flag), None)
    if first is None:
        raise UserError(f"{flag}: {Path(path)} has no rows")
    for key_flag, key in columns.items():
        column(first, key, f"{key_flag} (now {key!r})")
