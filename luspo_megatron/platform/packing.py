"""How a packed (thd) micro-batch is described to megatron's layers, on every pipeline stage and TP rank alike."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.packed_seq_params import PackedSeqParams


@dataclass
class Packing(PackedSeqParams):
    """PackedSeqParams with what the local modules need on the host, computed once per micro-batch.

    ``positions`` [T] counts from 0 in each sequence. ``rectangle`` [n_seq, max_seqlen] indexes the packed tokens as
    right-padded rows (padding points at token 0) and ``flat`` [T] is the way back; both are None when padding would
    more than double the rows.
    """

    lengths: list[int] = field(default_factory=list)
    positions: torch.Tensor | None = None
    rectangle: torch.Tensor | None = None
    flat: torch.Tensor | None = None


def pack_params(cu_seqlens: np.ndarray, device: torch.device) -> Packing:
    """cu_seqlens [n_seq + 1] int32 (cu_seqlens[-1] == T) -> Packing on `device`."""
    starts, lengths = cu_seqlens[:-1].astype(np.int64), np.diff(cu_seqlens).astype(np.int64)
    total, longest = int(cu_seqlens[-1]), int(lengths.max())
    positions = np.arange(total) - np.repeat(starts, lengths)
    rectangle = flat = None
    if len(lengths) > 1 and len(lengths) * longest <= 2 * total:
        columns = np.arange(longest)
        rectangle = np.where(columns[None] < lengths[:, None], starts[:, None] + columns[None], 0)
        flat = np.repeat(np.arange(len(lengths)) * longest, lengths) + positions

    def tensor(x: np.ndarray | None) -> torch.Tensor | None:
        return None if x is None else torch.from_numpy(x).to(device)

    cu = torch.from_numpy(cu_seqlens.astype(np.int32)).to(device)
    return Packing(qkv_format="thd", cu_seqlens_q=cu, cu_seqlens_kv=cu, max_seqlen_q=longest, max_seqlen_kv=longest,
                   lengths=lengths.tolist(), positions=tensor(positions), rectangle=tensor(rectangle),
                    flat=tensor(flat))


class PackedRotaryEmbedding(RotaryEmbedding):
    """Rotary frequencies already gathered per packed token: [T, 1, 1, d] instead of [max_seqlen, 1, 1, d].

    megatron's unfused thd rope then rotates the whole pack at once (the "packed freqs" case of
    megatron/core/models/common/embeddings/rope_utils.py) instead of one sequence at a time. Only for the unfused rope.
    """

    def get_rotary_seq_len(self, inference_context: Any, transformer: Any, transformer_input: Any,
                           transformer_config: Any, packed_seq_params: Any = None, **kwargs: Any) -> int:
        self._packing = packed_seq_params
        return super().get_rotary_seq_len(inference_context, transformer, transformer_input, transformer_config,
                                          packed_seq_params, **kwargs)

    def forward(self, max_seq_len: int, offset: int = 0, packed_seq: bool = False,
                cp_group: Any = None) -> torch.Tensor:
        freqs = super().forward(max_seq_len, offset, packed_seq=packed_seq, cp_group=cp_group)
        return freqs[self._packing.positions]
