"""How many processes an engine's flags make of it: what the fleet and `luspo plan` need before a server runs. Pure.

The weight groups count every process that holds weights. Left out: reading flags from an engine's configuration file.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from luspo_megatron.config import RolloutConfig
from luspo_megatron.errors import UserError

# The spellings that the engines' own parsers take (tests compare), by what they set.
SPELLINGS: dict[str, dict[str, tuple[str, ...]]] = {
    "vllm": {
        "tp": ("--tensor-parallel-size", "-tp"),
        "pp": ("--pipeline-parallel-size", "-pp"),
        "dp": ("--data-parallel-size", "-dp"),
        "nodes": ("--nnodes", "-n"),
    },
    "sglang": {
        "tp": ("--tp-size", "--tensor-parallel-size", "--tp"),
        "pp": ("--pp-size", "--pipeline-parallel-size", "--pp"),
        "dp": ("--dp-size", "--data-parallel-size", "--dp"),
        "ep": ("--ep-size", "--expert-parallel-size", "--ep"),
        "nodes": ("--nnodes",),
    },
}
SWITCHES = {"vllm": ("--enable-expert-parallel", "-ep"), "sglang": ("--enable-dp-attention",)}


@dataclass(frozen=True)
class EngineLayout:
    """Parallel sizes of one engine. ``workers``: its processes that hold weights; ``nodes``: machines it spans."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1
    nodes: int = 1
    workers: int = 1

    @property
    def workers_per_node(self) -> int:
        return self.workers // self.nodes

    def spread(self, engines: int, nodes: int) -> int:
        """How many of ``nodes`` trainers' nodes such engines share: whole groups of `nodes` nodes, and no idle one."""
        return min(engines * self.nodes, nodes // self.nodes * self.nodes)


def engine_flags(config: RolloutConfig) -> list[str]:
    """rollout.engine_args as single words."""
    return [word for words in config.engine_args for word in shlex.split(words)]


def _size(flags: Sequence[str], names: tuple[str, ...]) -> int:
    found = 1
    for index, word in enumerate(flags):
        name, equals, value = word.partition("=")
        if name.replace("_", "-") not in names:
            continue
        text = value if equals else flags[index + 1] if index + 1 < len(flags) else ""
        if not text.isdigit() or int(text) < 1:
            raise UserError(f"rollout.engine_args: {word} needs a whole number of at least 1, got {text!r}")
        found = int(text)
    return found


def engine_layout(engine: str, flags: Sequence[str]) -> EngineLayout:
    """The layout that ``flags`` (the engine's own) ask for. Raises UserError for one that no push could reach."""
    if engine not in SPELLINGS:
        return EngineLayout()
    sizes = {what: _size(flags, names) for what, names in SPELLINGS[engine].items()}
    switch = any(word.replace("_", "-") in SWITCHES[engine] for word in flags)
    tp, pp, dp, nodes = sizes["tp"], sizes["pp"], sizes["dp"], sizes["nodes"]
    if engine == "vllm":
        ep, workers = (tp * dp if switch else 1), tp * pp * dp
        if nodes > 1 and dp > 1:
            raise UserError(f"rollout.engine_args: vLLM with {dp} data-parallel replicas over {nodes} nodes is not "
                            "started here; raise rollout.num_engines instead")
    else:
        ep, workers = sizes["ep"], tp * pp
        if dp > 1 and not switch:
            raise UserError(f"rollout.engine_args: SGLang takes no weight push with {dp} data-parallel replicas in one "
                            "server; raise rollout.num_engines instead, or add --enable-dp-attention")
        if pp > 1:
            raise UserError(f"rollout.engine_args: SGLang with {pp} pipeline stages takes no weight push yet; "
                            "use --tp-size")
    if workers % nodes:
        raise UserError(f"rollout.engine_args: {workers} engine processes do not divide over {nodes} nodes")
    return EngineLayout(tp, pp, dp, ep, nodes, workers)


def layout_of(config: RolloutConfig) -> EngineLayout:
    """Of the engines that a recipe asks for. Raises UserError as `engine_layout` does."""
    return engine_layout(config.engine, engine_flags(config))
