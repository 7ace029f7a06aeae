"""All groups of a process share one gloo device: one polling thread, whatever the number of groups; they still work."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from luspo_megatron.platform import platform

platform()
rank = int(sys.argv[1])
dist.init_process_group("gloo", store=dist.FileStore(sys.argv[2], 2), rank=rank, world_size=2)
for number in range(30):
    group = dist.new_group([0, 1])
    value = torch.tensor([float(rank + number)])
    dist.all_reduce(value, group=group)
    assert value.item() == 2 * number + 1
assert isinstance(group._get_backend(torch.device("cpu")), c10d.ProcessGroupGloo)
dist.monitored_barrier()
names = [task.read_text().strip() for task in Path("/proc/self/task").glob("*/comm")]
print(names.count("gloo_tcp_loop"), flush=True)
dist.barrier()
"""


def test_thirty_groups_poll_with_one_thread(tmp_path) -> None:
    ranks = [subprocess.Popen([sys.executable, "-W", "ignore", "-c", PROGRAM, str(rank), str(tmp_path / "store")],
                              stdout=subprocess.PIPE, text=True) for rank in range(2)]
    assert [(rank.communicate(timeout=120)[0].strip(), rank.returncode) for rank in ranks] == [("1", 0)] * 2
