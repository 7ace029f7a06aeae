"""ParallelLayout: rank <-> coordinate maths of the Megatron rank grid, pure Python.

Imports neither torch nor megatron, so that planning, preflight and tests need no processes. The order is Megatron's
``tp-cp-ep-dp-pp`` (megatron/core/parallel_state.py): tp varies fastest, pp slowest. Attention and dense layers see the
grid (tp, cp, dp, pp); experts see the same ranks as (etp, ep, edp, pp).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ParallelLayout:
    """Sizes of the parallel dimensions. ``etp=0`` in the config means "as tp" and is resolved before this class."""

    world_size: int = 1
    tp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int = 1
    cp: int = 1

    def violations(self) -> list[str]:
        """Every rule that the sizes break, empty when the layout is possible."""
        out = [f"{name}={value} must be at least 1" for name, value in vars(self).items() if value < 1]
        if out:
            return out
        dense, expert = self.tp * self.cp * self.pp, self.etp * self.ep * self.pp
        if self.world_size % dense:
            out.append(f"world_size={self.world_size} is not a multiple of tp*cp*pp={dense}")
        if self.world_size % expert:
            out.append(f"world_size={self.world_size} is not a multiple of etp*ep*pp={expert}")
        return out

    @property
    def dp(self) -> int:
        return self.world_size // (self.tp * self.cp * self.pp)

    @property
    def edp(self) -> int:
        """Data-parallel size of the experts."""
        return self.world_size // (self.etp * self.ep * self.pp)

    def _check(self, rank: int) -> None:
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is outside a world of {self.world_size}")

    def dense_coordinate(self, rank: int) -> dict[str, int]:
        """rank -> {tp, cp, dp, pp}"""
        self._check(rank)
        tp, rest = rank % self.tp, rank // self.tp
        cp, rest = rest % self.cp, rest // self.cp
        return {"tp": tp, "cp": cp, "dp": rest % self.dp, "pp": rest // self.dp}

    def expert_coordinate(self, rank: int) -> dict[str, int]:
        """rank -> {etp, ep, edp, pp}"""
        self._check(rank)
        etp, rest = rank % self.etp, rank // self.etp
        ep, rest = rest % self.ep, rest // self.ep
        return {"etp": etp, "ep": ep, "edp": rest % self.edp, "pp": rest // self.edp}

    def dense_rank(self, *, tp: int = 0, cp: int = 0, dp: int = 0, pp: int = 0) -> int:
        return tp + self.tp * (cp + self.cp * (dp + self.dp * pp))

    def expert_rank(self, *, etp: int = 0, ep: int = 0, edp: int = 0, pp: int = 0) -> int:
        return etp + self.etp * (ep + self.ep * (edp + self.edp * pp))

    def token_multiple(self, sequence_parallel: bool) -> int:
        """A micro-batch's token count must divide by this (TP under SP; 2*CP*TP under CP)."""
        tp = self.tp if sequence_parallel else 1
        return tp * (2 * self.cp if self.cp > 1 else 1)

    def __str__(self) -> str:
        sizes = {"tp": self.tp, "cp": self.cp, "pp": self.pp, "dp": self.dp, "ep": self.ep}
        parts = [f"{name}{value}" for name, value in sizes.items() if value > 1]
        if self.ep > 1 and self.etp != 1:
            parts.append(f"etp{self.etp}")
        return "x".join(parts) or "1"
