"""Weight sync against the raw link: a 1 GB model, 4 trainer ranks to one receiver over gloo, checksums on.

    make bench-sync        (or: python -m benchmarks.bench_sync [--gigabytes 1] [--bucket-mb 48] [--layout tp2xep4])

The model has Qwen3-30B-A3B's proportions (19 of 20 bytes are experts), random weights and no forward pass. In the same
run, between the same processes: raw bandwidth (256 MB send/recv from each sender to the receiver, best of 5) and the
push (plan, gather, checksums at both ends, load into the receiver's own tensors). Then the plan of the real model and
the seconds that its bytes take at given link rates. Prints the ratio, the peak extra memory of each sender in buckets,
and whether both meet their bounds; exit code 1 where one does not. The last line is all of it as JSON. Run it on an
idle machine: other work hurts the push more than the short raw transfers.

Left out: real engines' own loading, NCCL.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import os
import sys
import tempfile
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

REPEATS = 5
RAW_BYTES = 256 * 2**20
RANKS = 4
LEAST_RATIO, MOST_BUCKETS = 0.60, 3.0
# Published seconds for Qwen3-30B-A3B (1.x TB of links vary): NeMo-RL shard to shard, miles, slime, verl, vime.
PUBLISHED = "for Qwen3-30B-A3B: 0.74-1.00 (NeMo-RL), 2.2-2.7 (miles), 3-7 (slime), 7 (verl), 11-13.5 (vime), " \
    "21-26 s (slime with pause and flush)"


def shape_for(gigabytes: float) -> Any:
    """An architecture of about that many bytes in float32, in proportions like Qwen3-30B-A3B's."""
    from luspo_megatron.weights.architecture import Architecture

    layers = max(1, round(4 * gigabytes))
    return Architecture("qwen3_moe", layers, 512, 8, 4, 64, 1024, 4096, 1e-6, 1e6, 1024, False, num_experts=128,
                        top_k=8, moe_ffn=320, norm_topk_prob=True)


def layout_of(name: str) -> Any:
    from luspo_megatron.parallel import ParallelLayout

    sizes = {"tp": 1, "pp": 1, "ep": 1}
    for part in name.split("x"):
        sizes[part[:2]] = int(part[2:])
    return ParallelLayout(RANKS, **sizes)


class Shards:
    """The gatherer's view of a rank's parameters, without a model: `ShardGatherer` on random shards."""

    def __init__(self, table: Any, layout: Any, rank: int) -> None:
        import torch
        import torch.distributed as dist

        from luspo_megatron.weights.gather import ShardGatherer
        from luspo_megatron.weights.plan import members_of, stages_of

        stages = stages_of(table.arch.num_layers, layout.pp)
        generator = torch.Generator().manual_seed(rank)
        self.gatherer = ShardGatherer.__new__(ShardGatherer)
        shards = {}
        for entry in table.entries():
            members = members_of(entry, table, layout, stages)
            if rank in members:
                shape = entry.row.layout.shard_shape(entry.row.shapes, len(members))
                shards[entry.megatron] = torch.randn(shape, generator=generator)
        self.nbytes = sum(t.numel() * 4 for t in shards.values())
        group = None
        for pp in range(layout.pp):
            for dp in range(layout.dp):
                ranks = [layout.dense_rank(tp=t, dp=dp, pp=pp) for t in range(layout.tp)]
                made = dist.new_group(ranks)
                group = made if rank in ranks else group
        self.group = group
        self.gatherer.rank, self.gatherer._shards = rank, shards


class Engine:
    """The receiver's process as rank 0 sees it: over two pipes."""

    def __init__(self, connection: Any) -> None:
        self._connection, self.generation = connection, -1
        self._pool = ThreadPoolExecutor(1)

    def weights_status(self) -> Any:
        return argparse.Namespace(version=0, num_workers=1, needs_connect=self.generation < 0, generation=-1)

    def _ask(self, *message: Any) -> Future[Any]:
        self._connection.send(message)
        return self._pool.submit(self._connection.recv)

    def connect_weights(self, *args: Any, **kwargs: Any) -> Future[Any]:
        self.generation = 0
        return self._ask("connect", args, kwargs)

    def update_weights_async(self, manifest: Any) -> Future[Any]:
        return self._ask("update", (manifest,), {})


def watch_memory(stop: threading.Event, peak: list[float]) -> None:
    """Peak resident bytes of this process while the event is not set."""
    import psutil

    me = psutil.Process()
    while not stop.is_set():
        peak[0] = max(peak[0], me.memory_info().rss)
        stop.wait(0.01)


def trainer(rank: int, args: argparse.Namespace, folder: str, connection: Any, results: Any) -> None:
    import psutil
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/world", RANKS + 1), rank=rank, world_size=RANKS + 1)
    trainers = dist.new_group(list(range(RANKS)))
    from luspo_megatron.config import WeightSyncConfig
    from luspo_megatron.ranks import Ranks
    from luspo_megatron.weights import sync as sync_module
    from luspo_megatron.weights.table import WeightTable

    table, layout = WeightTable(shape_for(args.gigabytes)), layout_of(args.layout)
    shards = Shards(table, layout, rank)
    ranks = Ranks(layout, rank, trainers, shards.group, shards.group)
    shards.gatherer._ranks = ranks
    raw_send(rank)
    settings = WeightSyncConfig(bucket_bytes=args.bucket_mb * 2**20, verify=args.verify)
    sync_module.ShardGatherer = lambda *_: shards.gatherer  # type: ignore[assignment, misc]
    sync = sync_module.WeightSync(None, table, ranks, settings, dtype="float32",
                                  device=torch.device("cpu"), engines=Engine(connection) if rank == 0 else None)
    before = psutil.Process().memory_info().rss
    sync.push(1)  # connects, and touches every page once
    seconds, extra = [], psutil.Process().memory_info().rss - before
    for version in range(2, 2 + REPEATS):
        dist.barrier(group=trainers)
        stop, peak = threading.Event(), [0.0]
        watcher = threading.Thread(target=watch_memory, args=(stop, peak))
        watcher.start()
        began = time.perf_counter()
        sync.push(version)
        seconds.append(time.perf_counter() - began)
        stop.set()
        watcher.join()
        extra = max(extra, peak[0] - before)
    results.put({"rank": rank, "seconds": seconds, "extra": extra / settings.bucket_bytes, "nbytes": sync.plan.nbytes,
                 "source": rank in sync.plan.sources})
    sync.close()
    if rank == 0:
        connection.send(("end", (), {}))


def raw_send(rank: int) -> None:
    import torch
    import torch.distributed as dist

    data = torch.ones(RAW_BYTES, dtype=torch.uint8)
    for sender in range(RANKS):
        for _ in range(REPEATS + 1):
            dist.barrier()
            if rank == sender:
                dist.send(data, RANKS)


def receiver(args: argparse.Namespace, folder: str, connection: Any, results: Any) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/world", RANKS + 1)
    dist.init_process_group("gloo", store=store, rank=RANKS, world_size=RANKS + 1)
    dist.new_group(list(range(RANKS)))
    layout = layout_of(args.layout)
    for pp in range(layout.pp):
        for dp in range(layout.dp):
            dist.new_group([layout.dense_rank(tp=t, dp=dp, pp=pp) for t in range(layout.tp)])
    data = torch.zeros(RAW_BYTES, dtype=torch.uint8)
    rates: list[float] = []
    for sender in range(RANKS):
        times = []
        for _ in range(REPEATS + 1):
            dist.barrier()
            began = time.perf_counter()
            dist.recv(data, sender)
            times.append(time.perf_counter() - began)
        rates.append(RAW_BYTES / min(times[1:]))
    results.put({"rank": RANKS, "rates": rates})
    del data
    from luspo_megatron.weights.manifest import EngineConnection, Manifest
    from luspo_megatron.weights.transports.process_group import ProcessGroupReceiver

    held: dict[str, torch.Tensor] = {}
    ends: Any = None
    while True:
        what, values, options = connection.recv()
        if what == "end":
            return
        if what == "connect":
            host, port, generation, sources = values
            ends = ProcessGroupReceiver(EngineConnection(host, port, generation, sources, options["world_size"], 1,
                                                         options["timeout"]))
        else:
            manifest = Manifest.from_dict(values[0])
            ends.begin(manifest)
            for bucket in manifest.buckets:
                buffer = ends.receive(bucket)
                for piece in bucket.slices:
                    whole = held.get(piece.name)
                    if whole is None:
                        whole = held[piece.name] = torch.zeros(piece.shape)
                    whole.view(-1)[piece.start : piece.start + piece.numel].copy_(
                        buffer[piece.offset : piece.offset + piece.nbytes].view(torch.float32))
        connection.send(None)


def run(args: argparse.Namespace) -> dict[str, Any]:
    context = mp.get_context("spawn")
    ours, theirs = context.Pipe()
    results = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        processes = [context.Process(target=trainer, args=(rank, args, folder, ours if rank == 0 else None, results))
                     for rank in range(RANKS)]
        processes.append(context.Process(target=receiver, args=(args, folder, theirs, results)))
        for process in processes:
            process.start()
        found = [results.get(timeout=args.timeout) for _ in processes]
        for process in processes:
            process.join(30)
    ranks = sorted((f for f in found if f["rank"] < RANKS), key=lambda f: f["rank"])
    raw = next(f for f in found if f["rank"] == RANKS)["rates"]
    seconds = min(ranks[0]["seconds"])
    return {"layout": args.layout, "verify": args.verify, "bytes": ranks[0]["nbytes"],
            "raw_gb_s": [round(rate / 1e9, 3) for rate in raw], "seconds": [round(s, 3) for s in ranks[0]["seconds"]],
            "gb_s": round(ranks[0]["nbytes"] / seconds / 1e9, 3),
            "ratio": round(ranks[0]["nbytes"] / seconds / (sum(raw) / len(raw)), 3),
            "extra_buckets": [round(f["extra"], 2) for f in ranks]}


def projection(link_rate: float, gather_rate: float) -> str:
    from luspo_megatron.parallel import ParallelLayout
    from luspo_megatron.weights.architecture import Architecture
    from luspo_megatron.weights.plan import Receivers
    from luspo_megatron.weights.plan_report import describe_sync
    from luspo_megatron.weights.table import WeightTable

    arch = Architecture("qwen3_moe", 48, 2048, 32, 4, 128, 6144, 151936, 1e-6, 1e6, 40960, False, num_experts=128,
                        top_k=8, moe_ffn=768)
    return describe_sync(WeightTable(arch), ParallelLayout(8, tp=4, ep=8), "bfloat16", 512 * 2**20, Receivers(8),
                         link_rate=link_rate, gather_rate=gather_rate)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--bucket-mb", type=int, default=48)
    parser.add_argument("--layout", default="tp2xep4", help="of the 4 ranks: parts tpN, ppN, epN joined by x")
    parser.add_argument("--verify", default="full", choices=("off", "sample", "full"))
    parser.add_argument("--link-gb-s", type=float, nargs="+", default=[50.0, 400.0],
                        help="rates of the projection: one network card, one NVLink port")
    parser.add_argument("--timeout", type=float, default=600.0)
    parser.add_argument("--json", type=Path, default=None, help="also write the numbers here")
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    result = run(args)
    print(f"{result['bytes'] / 1e9:.2f} GB, 4 ranks ({args.layout}) to 1 receiver over gloo, buckets of "
          f"{args.bucket_mb} MB, checksums {args.verify}")
    print(f"raw send/recv  {result['raw_gb_s']} GB/s by sender (best of {REPEATS})")
    print(f"weight sync    {result['gb_s']} GB/s (best of {REPEATS}: {result['seconds']} s), ratio {result['ratio']} "
          f"(at least {LEAST_RATIO})")
    print(f"extra memory   {result['extra_buckets']} buckets by rank (at most {MOST_BUCKETS:g})")
    for rate in args.link_gb_s:
        print(projection(rate * 1e9, 300e9))
    print(PUBLISHED)
    result |= {"least_ratio": LEAST_RATIO, "most_buckets": MOST_BUCKETS, **here()}
    result["good"] = result["ratio"] >= LEAST_RATIO and max(result["extra_buckets"]) <= MOST_BUCKETS
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))
    return int(not result["good"])


def here() -> dict[str, Any]:
    """The machine, how busy it is, and the commit: a ratio of rates means little without them."""
    from benchmarks.here import commit, machine

    return {"machine": machine(), "load": [round(load, 1) for load in os.getloadavg()], "commit": commit()}


if __name__ == "__main__":
    sys.exit(main())
