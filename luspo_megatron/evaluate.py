"""`luspo eval`: pass@1, pass@k and greedy of a Hugging Face model or of a checkpoint on held-out prompts.

A Hugging Face model is served as it is. A checkpoint is loaded into one process and pushed to the engines.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from luspo_megatron import run
from luspo_megatron.config import Config, EvalCommandConfig, RunConfig
from luspo_megatron.config_io import save_config
from luspo_megatron.launch import dry
from luspo_megatron.rollout.flag_check import check_engine_flags

if TYPE_CHECKING:
    from luspo_megatron.rollout.client import ControllerClient


def main(config: EvalCommandConfig) -> int:
    from luspo_megatron.preflight import check_eval
    from luspo_megatron.rollout.client import ControllerClient

    checkpoint = run.find_checkpoint(config.checkpoint) if config.checkpoint else None
    if checkpoint is not None and not config.model.hf:
        trained_from = run.model_of(checkpoint)
        model = replace(trained_from, tokenizer=config.model.tokenizer or trained_from.tokenizer)
        config = replace(config, model=model)
    if dry.wanted():
        print(f"dry run: {check_engine_flags(config)}")
        print(f"dry run: would evaluate {config.checkpoint or config.model.hf} on {config.data.eval_prompts}, "
              f"{config.eval.samples} samples per prompt, and write {Path(config.out) / 'eval.json'}")
        return 0
    check_eval(config)
    out = Path(config.out)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="luspo-")))
        settings = Config(run=RunConfig(dir=config.out, seed=config.seed), model=config.model, data=config.data,
                          rollout=config.rollout, reward=config.reward, eval=config.eval,
                          weight_sync=config.weight_sync)
        save_config(settings, folder / "config.yaml")
        client = stack.enter_context(ControllerClient.start(folder / "config.yaml", out))
        if checkpoint is not None:
            sync = _push(config, checkpoint, client, stack)
        handle = client.evaluate_async(config.eval.samples, config.eval.temperature, config.eval.greedy, 0, config.seed)
        while not client.wait(handle):
            sync.push(1)  # an engine was started again
        result = handle.result()
    run.save_settings(config, out)
    (out / "eval.json").write_text(json.dumps(result, indent=1) + "\n")
    for name, value in result.items():
        print(f"{name:20} {value:.4f}")
    print(f"written to {out / 'eval.json'}")
    return 0


def _push(config: EvalCommandConfig, checkpoint: Path, client: ControllerClient, stack: contextlib.ExitStack) -> Any:
    from luspo_megatron.weights.sync import WeightSync

    actor, _ = run.lone_actor(checkpoint)
    sync = WeightSync(actor.gpt, actor.table, actor.ranks, config.weight_sync, dtype=config.model.dtype,
                      device=actor.device, engines=client)
    stack.enter_context(contextlib.closing(sync))
    client.push_version = 1
    sync.push(1)
    return sync
