"""Engine kinds with a fault each, for the tests of `luspo parity`."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

from luspo_megatron.rollout.engine import EngineKind, EngineStart, GenerateRequest
from luspo_megatron.rollout.hf_client import HF_KIND, HfClient


class HotClient(HfClient):
    """Samples at another temperature than it is asked for: log-probs of other logits, from the right weights."""

    async def generate(self, request: GenerateRequest) -> Any:
        return await super().generate(dataclasses.replace(request, temperature=1.25 * request.temperature))


def _other_model(start: EngineStart) -> list[str]:
    return HF_KIND.command(dataclasses.replace(start, model=os.environ["PARITY_OTHER_MODEL"]))


HOT = EngineKind("hot", HotClient, HF_KIND.command)
OTHER_MODEL = EngineKind("other", HfClient, _other_model)
