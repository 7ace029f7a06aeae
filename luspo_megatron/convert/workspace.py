"""The folder that a conversion writes to, so that an interrupted one leaves nothing that looks finished.

    OUT.partial/out/     what becomes OUT, by one rename at the end
    OUT.partial/work/    plan.json (options and source files) and one JSON file per finished part

A part is recorded after its data is on disk, so `--resume` trusts what is recorded and makes the rest anew. A lock
keeps a second conversion out.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

from luspo_megatron.convert.tensors import CheckpointError, sync_folder, write_durably
from luspo_megatron.errors import UserError
from luspo_megatron.folder_lock import take_lock

MANIFEST = "conversion.json"
LOCK_PATIENCE = 5.0  # seconds


def is_complete(out: Path) -> bool:
    """Whether a conversion has been published to `out`; removes what an interruption after that left over."""
    if not (out / MANIFEST).is_file():
        return False
    shutil.rmtree(out.with_name(out.name + ".partial"), ignore_errors=True)
    return True


class Workspace:
    """`plan` is JSON data that must be the same when a conversion is resumed. A context manager: holds the lock."""

    def __init__(self, out: Path, plan: dict[str, Any], *, resume: bool) -> None:
        self.final = out
        self.partial = out.with_name(out.name + ".partial")
        self.out, self.work = self.partial / "out", self.partial / "work"
        if out.exists():
            raise UserError(f"{out}: already exists; choose another folder or remove it")
        if self.partial.exists() and not resume:
            raise UserError(f"{self.partial}: left from an interrupted conversion; go on with --resume, or remove it")
        if not out.parent.is_dir():
            raise UserError(f"{out.parent}: no such folder; make it first")
        self.work.mkdir(parents=True, exist_ok=True)
        self.out.mkdir(exist_ok=True)
        self._lock: int | None = self._take_lock()
        try:
            self._check_plan(plan)
        except BaseException:
            self.close()
            raise

    def _take_lock(self) -> int:
        """Workers inherit the lock, so a killed conversion holds it until the last of them has died, which takes a
        moment."""
        fd = take_lock(self.work / "lock", LOCK_PATIENCE)
        if fd is None:
            raise UserError(f"{self.partial}: another conversion is writing to it; wait for it, or choose "
                            "another --out")
        return fd

    def _check_plan(self, plan: dict[str, Any]) -> None:
        path = self.work / "plan.json"
        plan = json.loads(json.dumps(plan))
        if path.is_file():
            known = json.loads(path.read_text())
            if known != plan:
                changed = sorted(key for key in plan.keys() | known.keys() if plan.get(key) != known.get(key))
                raise UserError(f"{self.partial}: was begun with other options or another source (changed: "
                                f"{', '.join(changed)}); repeat the old ones, or remove the folder")
        else:
            write_durably(path, json.dumps(plan, indent=1).encode())

    def recorded(self, part: str) -> Any:
        """What was recorded for a finished part, None for others."""
        path = self.work / f"{part}.json"
        return json.loads(path.read_text()) if path.is_file() else None

    def record(self, part: str, data: Any) -> None:
        sync_folder(self.out)
        write_durably(self.work / f"{part}.json", json.dumps(data).encode())

    def need(self, nbytes: int) -> None:
        """CheckpointError when so many more bytes have no room. Quotas are only seen when they are hit."""
        free = shutil.disk_usage(self.partial).free
        if nbytes > free:
            raise CheckpointError(f"{self.final.parent}: {nbytes / 1e9:.2f} GB are needed and {free / 1e9:.2f} GB are "
                                  "free; make room and go on with --resume, or choose another --out")

    def publish(self) -> None:
        """The rename. What comes after it may be interrupted: the result is complete."""
        for folder in sorted({file.parent for file in self.out.rglob("*")}):
            sync_folder(folder)
        os.rename(self.out, self.final)
        sync_folder(self.final.parent)
        self.close()
        shutil.rmtree(self.partial, ignore_errors=True)

    def close(self) -> None:
        """Lets another conversion in."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def __enter__(self) -> Workspace:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def source_files(folder: Path) -> list[list[Any]]:
    """Name, size and modification time of the weight files, to notice that a source changed between two runs."""
    files = (p for p in sorted(folder.iterdir()) if p.is_file())
    return [[p.name, p.stat().st_size, p.stat().st_mtime_ns] for p in files]
