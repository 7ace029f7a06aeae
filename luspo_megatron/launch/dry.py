"""A rank of a dry run (LUSPO_DRY_RUN=1): everything of a launch but the model, without torch.

Every rank looks for its GPU, opens its log in the run folder, and reports to rank 0 at the
master's address and port, as the real ranks would. Rank 0 prints who is where and ends when all have come. So wrong
node lists, unreachable masters, double rank numbers and missing mounts show in seconds.

Run (the launcher does): python -m luspo_megatron.launch.dry --config FILE
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import yaml

from luspo_megatron.config import Config, SftConfig
from luspo_megatron.config_checks import model_facts, resolve_layout
from luspo_megatron.config_io import load_config
from luspo_megatron.errors import RunError, UserError
from luspo_megatron.parallel import ParallelLayout

VARIABLE = "LUSPO_DRY_RUN"
SECONDS = 120.0  # within which all ranks must have reported


def wanted() -> bool:
    """Whether the ranks are only to find each other: everything but the model."""
    return os.environ.get(VARIABLE) == "1"


def main(argv: list[str]) -> int:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    me = {"rank": rank, "local_rank": int(os.environ["LOCAL_RANK"]),
          "node": os.environ.get("SLURMD_NODENAME") or socket.gethostname(),
          "gpus": os.environ.get("CUDA_VISIBLE_DEVICES", ""), "writes": os.access(Path(argv[-1]).parent, os.W_OK)}
    print(json.dumps(me), flush=True)
    address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    deadline = time.monotonic() + SECONDS
    if rank:
        _report(address, me, deadline)
        return 0
    cold_start = "batch_size" in yaml.safe_load(Path(argv[-1]).read_text())
    config: Config | SftConfig = load_config(SftConfig, argv) if cold_start else load_config(Config, argv)
    layout = resolve_layout(config.parallel, model_facts(config.model))
    if world != layout.world_size:
        raise RunError(f"{world} processes were started for a layout of {layout.world_size}")
    print("\n".join(_table(_collect(address[1], me, world, deadline), layout)), flush=True)
    return 0


def _report(address: tuple[str, int], me: dict[str, Any], deadline: float) -> None:
    while True:
        try:
            with socket.create_connection(address, 5.0) as connection:
                connection.sendall(json.dumps(me).encode() + b"\n")
                connection.settimeout(max(1.0, deadline - time.monotonic()))
                connection.recv(1)  # rank 0 has it
                return
        except OSError as error:
            if time.monotonic() > deadline:
                raise RunError(f"rank {me['rank']} on {me['node']} cannot reach rank 0 at {address[0]}:{address[1]} "
                               f"({error}); set MASTER_ADDR to an address that all nodes reach") from None
            time.sleep(0.2)


def _collect(port: int, me: dict[str, Any], world: int, deadline: float) -> list[dict[str, Any]]:
    found = {0: me}
    with socket.create_server(("", port), backlog=world) as server:
        while len(found) < world:
            server.settimeout(max(0.1, deadline - time.monotonic()))
            try:
                connection, _ = server.accept()
            except TimeoutError:
                missing = sorted(set(range(world)) - set(found))
                raise RunError(f"ranks {missing[:8]} of {world} did not report to rank 0 in {SECONDS:.0f} s") from None
            with connection, connection.makefile("rb") as lines:
                other = json.loads(lines.readline())
                if other["rank"] in found:
                    raise RunError(f"two processes are rank {other['rank']}: {found[other['rank']]} and {other}")
                found[other["rank"]] = other
                connection.sendall(b".")
    return [found[rank] for rank in range(world)]


def _table(found: list[dict[str, Any]], layout: ParallelLayout) -> list[str]:
    nodes: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for one in found:
        nodes[one["node"]].append(one)
    lines = [f"dry run: {len(found)} ranks on {len(nodes)} nodes have found each other; layout {layout}"]
    for node, ones in nodes.items():
        ranks = [one["rank"] for one in ones]
        write = "" if all(one["writes"] for one in ones) else "; CANNOT WRITE to the run folder"
        gpus = ones[0]["gpus"] or "none"
        lines.append(f"  {node}: ranks {min(ranks)}-{max(ranks)} ({len(ranks)}), GPUs {gpus}{write}")
    return lines


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except (RunError, UserError) as error:
        print(f"luspo: {error}", file=sys.stderr, flush=True)
        sys.exit(error.exit_code)
