"""One rank of a run that this program has started: ``python -m luspo_megatron.launch.rank MODULE --config FILE``
runs MODULE as ``__main__``.

Before the module is imported (torch takes seconds) it makes the process safe to own: the request to stop is heeded from
the first moment (launch/stop.py), and the rank with all its children dies when the launcher dies, however it dies. The
second is done, on this machine, by a pipe whose other end only the launcher holds: the kernel closes it with the
launcher, a thread here sees the end of file and kills its own process group. Unlike PR_SET_PDEATHSIG this reaches the
children too. Under srun (launch/slurm.py) Slurm does it; there the rank finds its place in the environment and opens
its own log.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import threading

from luspo_megatron.launch import environment, stop

LOG = "LUSPO_RANK_LOG"  # environment variable: path of the log of every rank but the first, {rank} in it
LIFELINE = "LUSPO_LAUNCHER_FD"  # environment variable: file descriptor of the read end of the pipe


def main() -> None:
    environment.adopt()
    stop.install()
    _own_log(os.environ.pop(LOG, ""), os.environ.get("RANK", "0"))
    # A rank is in a background process group of the terminal: `stty tostop` must not suspend it when it prints.
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    lifeline = os.environ.pop(LIFELINE, "")
    if lifeline:
        os.set_inheritable(int(lifeline), False)
        threading.Thread(target=_die_with_launcher, args=(int(lifeline),), daemon=True).start()
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


def _own_log(path: str, rank: str) -> None:
    """Output of every rank but the first goes to a file of its own, which is never one that is there already."""
    if path and rank != "0":
        file = os.open(path.replace("{rank}", rank), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o644)
        os.dup2(file, 1)
        os.dup2(file, 2)
        os.close(file)


def _die_with_launcher(lifeline: int) -> None:
    os.read(lifeline, 1)  # nothing is ever written: returns when the launcher is gone
    os.killpg(0, signal.SIGKILL)  # the launcher has made this process the leader of its own group


if __name__ == "__main__":
    main()
