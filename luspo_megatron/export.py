"""`luspo export`: a checkpoint as a Hugging Face folder. Runs in one process and needs no GPU."""

from __future__ import annotations

from luspo_megatron import run
from luspo_megatron.config import ExportConfig


def main(config: ExportConfig) -> int:
    from luspo_megatron.weights.export import export_hf

    checkpoint = run.find_checkpoint(config.checkpoint)
    actor, model = run.lone_actor(checkpoint)
    export_hf(actor.gpt, actor.table, actor.ranks, source_folder=model.hf, out=config.out,
              dtype=config.dtype or model.dtype)
    print(f"exported {checkpoint} to {config.out}")
    return 0
