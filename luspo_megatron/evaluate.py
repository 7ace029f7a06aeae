"""`luspo eval`: pass@1, pass@k and greedy of a Hugging Face model or of a checkpoint on held-out prompts.

A Hugging Face model is served as it is. A checkpoint is loaded into one process and pushed to the engines.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

from luspo_megatron import run
from luspo_megatron.config import Config, EvalCommandConfig, RunConfig
from luspo_megatron.config_io import save_config


def main(config: EvalCommandConfig) -> int:
    from luspo_megatron.rollout.client import ControllerClient

    out = Path(config.out)
    out.mkdir(parents=True, exist_ok=True)
    path = out / "config.yaml"
    save_config(Config(run=RunConfig(dir=config.out, seed=config.seed), model=config.model, data=config.data,
                       rollout=config.rollout, reward=config.reward, eval=config.eval,
                       weight_sync=config.weight_sync), path)
    with contextlib.ExitStack() as stack:
        client = stack.enter_context(ControllerClient.start(path, out))
        if config.checkpoint:
            _push(config, client, stack)
        result = client.evaluate(config.eval.samples, config.eval.temperature, config.eval.greedy, 0, config.seed)
    (out / "eval.json").write_text(json.dumps(result, indent=1) + "\n")
    for name, value in result.items():
        print(f"{name:20} {value:.4f}")
    print(f"written to {out / 'eval.json'}")
    return 0


def _push(config: EvalCommandConfig, client: object, stack: contextlib.ExitStack) -> None:
    from luspo_megatron.weights.sync import WeightSync

    actor, model = run.lone_actor(run.find_checkpoint(config.checkpoint))
    sync = WeightSync(actor.gpt, actor.table, actor.ranks, config.weight_sync, dtype=config.model.dtype,
                      device=actor.device, engines=client)  # type: ignore[arg-type]
    stack.enter_context(contextlib.closing(sync))
    sync.push(1)
