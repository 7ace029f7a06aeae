"""The end of a process that has been in a torch.distributed world.

gloo's threads outlive `destroy_process_group` wherever somebody still holds a group (megatron's DDP does, through C++
hooks). Such a thread may drop a tensor's last reference, which wants the interpreter; while the interpreter is being
taken down this aborts the process ("terminate called without an active exception"), after all its work is done. So the
exit functions run, the output is flushed, and the process ends without the rest of the interpreter's end.
"""

from __future__ import annotations

import atexit
import os
import sys
from typing import NoReturn


def end(code: int) -> NoReturn:
    """Leaves with this exit code; at once where torch.distributed has been started in this process."""
    torch = sys.modules.get("torch")
    if torch is None or not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        sys.exit(code)
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)
