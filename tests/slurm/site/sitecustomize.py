"""Loaded by every Python process of a test job (it is on PYTHONPATH): makes things happen at a given moment.

PHASE_SIGNALS names a JSON file, [[step, phase, command], ...]: each command runs once over all starts of the job, in
that phase: on rank 0, for "reward" in the controller, which then takes its time over the grades. DIE_AS_RANK: that rank
says so and dies when it joins the others. Nothing of the program is replaced: it is looked at from outside.
"""

import asyncio
import contextlib
import importlib.abc
import importlib.machinery
import json
import os
import subprocess
import sys
import time

PATH = os.environ.get("PHASE_SIGNALS", "")
DOOMED = os.environ.get("DIE_AS_RANK", "")


def _act(step, name):
    with open(PATH) as file:
        entries = json.load(file)
    for index, (at, phase, command) in enumerate(entries):
        done = f"{PATH}.{index}"
        if (at, phase) == (step, name) and not os.path.exists(done):
            with open(done, "w") as file:
                file.write(os.environ.get("SLURM_RESTART_COUNT", "0"))
            subprocess.run(command, shell=True, check=False)
            time.sleep(0.5)


def _watch_phases(module):
    phase = module.Desk.phase

    @contextlib.contextmanager
    def watched(self, name, total=None):
        with phase(self, name, total) as inner:
            if self._ranks.rank == 0:
                _act(self._progress.step, name)
            yield inner

    module.Desk.phase = watched


def _watch_rewards(module):
    next_batch, grade = module.Controller.next_batch, module.Controller._grade

    async def watched_batch(self, rollout_id, *rest, **named):
        self.watched_step = rollout_id
        return await next_batch(self, rollout_id, *rest, **named)

    async def watched_grade(self, pairs):
        await asyncio.to_thread(_act, getattr(self, "watched_step", 0), "reward")
        await grade(self, pairs)

    module.Controller.next_batch, module.Controller._grade = watched_batch, watched_grade


def _die(module):
    if os.environ.get("SLURM_PROCID") == DOOMED and "SLURM_STEP_ID" in os.environ:
        print("this rank dies now", file=sys.stderr, flush=True)
        os._exit(9)


WATCHED = {**({"luspo_megatron.desk": _watch_phases, "luspo_megatron.rollout.controller": _watch_rewards}
              if PATH else {}),
           **({"luspo_megatron.actor.actor": _die} if DOOMED else {})}


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname, path=None, target=None):
        if fullname not in WATCHED:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            WATCHED[fullname](module)

        spec.loader.exec_module = exec_module
        return spec


if WATCHED:
    sys.meta_path.insert(0, _Finder())
