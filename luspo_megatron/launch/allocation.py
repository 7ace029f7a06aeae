"""The nodes of a Slurm allocation: their names, which of them train, and how the first one is reached."""

from __future__ import annotations

import contextlib
import re
import socket
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from luspo_megatron.errors import UserError

SECONDS = 30  # that a Slurm command may take


def default_registry(run_dir: str | Path) -> Path:
    """Where a run and the supervisors of its engines meet (rollout/registry.py) when rollout.registry is empty."""
    return Path(run_dir) / "engines"


def expand_nodes(text: str) -> list[str]:
    """"n[1-3,07],login" -> n1, n2, n3, n07, login: Slurm's list of node names, in its order, numbers as padded."""
    return [name for part in _split(text) for name in _expand(part)]


def _split(text: str) -> Iterator[str]:
    """At the commas outside brackets."""
    depth, start = 0, 0
    for i, letter in enumerate(text):
        depth += (letter == "[") - (letter == "]")
        if letter == "," and depth == 0:
            yield text[start:i]
            start = i + 1
    if text[start:]:
        yield text[start:]


def _expand(part: str) -> Iterator[str]:
    match = re.fullmatch(r"([^\[]*)\[([^\]]*)\](.*)", part)
    if match is None:
        yield part
        return
    head, body, tail = match.groups()
    for item in body.split(","):
        low, dash, high = item.partition("-")
        numbers = [f"{n:0{len(low)}d}" for n in range(int(low), int(high) + 1)] if dash else [item]
        for number in numbers:
            yield from (head + number + rest for rest in _expand(tail))


@dataclass(frozen=True)
class Split:
    """Which nodes do what. Shared when the engines have none of their own."""

    trainers: tuple[str, ...]
    engines: tuple[str, ...]
    ranks_per_node: int


def split_nodes(nodes: Sequence[str], world_size: int, gpus_per_node: int, engine_nodes: int) -> Split:
    """Trainers take the first nodes, engines the last ``engine_nodes``. UserError when they do not add up."""
    per_node = min(gpus_per_node, world_size)
    if world_size % per_node:
        raise UserError(f"--parallel.world_size {world_size}: does not fill nodes of {gpus_per_node} ranks "
                        "(launch.gpus_per_node); take a multiple")
    needed = world_size // per_node
    if needed + engine_nodes != len(nodes):
        raise UserError(f"the allocation has {len(nodes)} nodes, the run needs {needed} for {world_size} ranks of "
                        f"{per_node} per node and {engine_nodes} for engines (launch.engine_nodes); "
                        f"submit with --nodes={needed + engine_nodes}, or change these sizes")
    return Split(tuple(nodes[:needed]), tuple(nodes[needed:]), per_node)


def address_of(node: str) -> str:
    """A name or address under which the other nodes reach ``node``.

    Its name where that resolves; else the NodeAddr of Slurm's configuration. A name that resolves to the loopback (as
    distributions write it into /etc/hosts for the machine itself) is of no use to others.
    """
    with contextlib.suppress(OSError):
        if not socket.gethostbyname(node).startswith("127."):
            return node
    found = re.search(r"\bNodeAddr=(\S+)", slurm_output("scontrol", "show", "node", node))
    if found is None or found[1] == node:
        return node
    return found[1]


def slurm_output(*command: str) -> str:
    """What a Slurm command prints; empty when it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""
