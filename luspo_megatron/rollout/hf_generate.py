"""Sampling from a Hugging Face causal model: one batch in, token ids and log-probs out.

A loop of our own and not ``model.generate``, because training needs what that does not give together: a seed per
sequence, log-probs of the full softmax at the sampling temperature, and stop tokens kept in the response. Each
sequence draws from its own stream of uniforms, so its sample depends on (seed, logits) alone, and one request gives
bitwise the same answer each time. Left out: continuous batching, prefix caching, beam search.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from luspo_megatron.types import FinishReason

ROW_BYTES = 64 * 2**20  # float64 work space of one slice of rows in `sample_rows`
COMPACT_BELOW = 0.75  # drop the finished rows when fewer than this share is still running


@dataclass
class Response:
    """What one sequence got; ``logprobs[i]`` belongs to ``response_ids[i]``."""

    response_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: FinishReason = "length"


def uniforms(seeds: Sequence[int], length: int) -> Tensor:
    """float64 [B, length] in [0, 1): row i is the stream of ``seeds[i]`` (Philox, keyed by the seed)."""
    rows = [np.random.Generator(np.random.Philox(key=seed)).random(length) for seed in seeds]
    return torch.from_numpy(np.stack(rows))


def sample_rows(logits: Tensor, uniform: Tensor, temperature: float, top_p: float) -> tuple[Tensor, Tensor]:
    """One token per row.

    ``logits`` [B, V]; ``uniform`` float64 [B] in [0, 1). Returns ids int64 [B] and the natural log-probs of the full
    softmax of logits / temperature, float64 [B]. temperature 0 takes the largest logit, with raw log-probs.
    """
    rows = max(1, ROW_BYTES // (8 * logits.shape[-1]))
    if logits.shape[0] > rows:
        parts = [sample_rows(a, b, temperature, top_p)
                 for a, b in zip(logits.split(rows), uniform.split(rows), strict=True)]
        return torch.cat([ids for ids, _ in parts]), torch.cat([logprobs for _, logprobs in parts])
    scaled = logits.double()
    if temperature > 0:
        scaled = scaled / temperature
    logprobs = torch.log_softmax(scaled, -1)  # [B, V]
    ids = logits.argmax(-1) if temperature == 0 else _inverse_cdf(logprobs.exp(), uniform, top_p)
    return ids, logprobs.gather(-1, ids[:, None])[:, 0]


def _inverse_cdf(probabilities: Tensor, uniform: Tensor, top_p: float) -> Tensor:
    """The token whose stretch of the cumulative distribution holds ``uniform``. [B, V], [B] -> [B].

    top_p < 1 keeps the smallest set of most likely tokens whose mass reaches top_p.
    """
    order = None
    if top_p < 1:
        probabilities, order = probabilities.sort(stable=True, dim=-1, descending=True)
        before = probabilities.cumsum(-1) - probabilities
        probabilities = torch.where(before < top_p, probabilities, 0.0)
    cumulative = probabilities.cumsum(-1)
    total = cumulative[:, -1:]
    # Strictly below the total, so that rounding never picks a token of probability 0.
    threshold = torch.minimum(uniform[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
    index = torch.searchsorted(cumulative, threshold, right=True)
    return (index if order is None else order.gather(-1, index))[:, 0]


@torch.inference_mode()
def generate(model: Any, prompts: Sequence[Sequence[int]], seeds: Sequence[int], *, temperature: float, top_p: float,
             max_response_tokens: int, stop_token_ids: Sequence[int]) -> list[Response]:
    """Continue every prompt until a stop token (kept) or ``max_response_tokens``. Deterministic in its arguments."""
    from transformers import DynamicCache

    device = model.device
    responses = [Response() for _ in prompts]
    current, attention_mask, positions = _left_padded(prompts, device)
    uniform = uniforms(seeds, max_response_tokens).to(device)  # [B, max_response_tokens]
    stops = torch.tensor(sorted(stop_token_ids), dtype=torch.int64, device=device)
    owners = torch.arange(len(prompts), device=device)  # the response that each row of the batch feeds
    live = torch.ones(len(prompts), dtype=torch.bool, device=device)
    cache = DynamicCache(config=model.config)
    cache_argument = {_cache_name(model): cache}
    for step in range(max_response_tokens):
        logits = model(input_ids=current, attention_mask=attention_mask, position_ids=positions,
                       use_cache=True, logits_to_keep=1, **cache_argument).logits[:, -1]  # [B, V]
        ids, logprobs = sample_rows(logits, uniform[owners, step], temperature, top_p)
        stopped = torch.isin(ids, stops)
        _append(responses, owners, live, ids, logprobs, stopped)
        live &= ~stopped
        count = int(live.sum())
        if count == 0 or step + 1 == max_response_tokens:
            break
        attention_mask = torch.cat([attention_mask, attention_mask.new_ones(len(owners), 1)], 1)
        positions, current = positions[:, -1:] + 1, ids[:, None]
        if count < COMPACT_BELOW * len(owners):
            keep = live.nonzero()[:, 0]
            cache.batch_select_indices(keep)
            attention_mask, positions, current = attention_mask[keep], positions[keep], current[keep]
            owners, live = owners[keep], live[keep]
    return responses


def _cache_name(model: Any) -> str:
    """Transformers renamed forward's ``past_key_values`` to ``cache`` within version 5."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def _left_padded(prompts: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """ids, mask and positions, int64 [B, longest]; the padding's id never matters, its mask is 0."""
    width = max(len(prompt) for prompt in prompts)
    ids = np.zeros((len(prompts), width), dtype=np.int64)
    mask = np.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt):] = prompt
        mask[row, width - len(prompt):] = 1
    attention_mask = torch.from_numpy(mask).to(device)
    return torch.from_numpy(ids).to(device), attention_mask, (attention_mask.cumsum(1) - 1).clamp(min=0)


def _append(responses: list[Response], owners: Tensor, live: Tensor, ids: Tensor, logprobs: Tensor,
            stopped: Tensor) -> None:
    rows = zip(owners.tolist(), live.tolist(), ids.tolist(), logprobs.tolist(), stopped.tolist(), strict=True)
    for owner, running, token, logprob, stop in rows:
        if running:
            response = responses[owner]
            response.response_ids.append(token)
            response.logprobs.append(logprob)
            if stop:
                response.finish_reason = "stop"
