"""The controller's process: one Unix socket, one client (trainer rank 0), JSON messages (wire.py).

It listens at once and builds the controller when the client says ``start``, so that whatever is wrong with data or
engines reaches the person through the client. When the client goes away, so does this process, with all it started.

Run (the trainer does): python -m luspo_megatron.rollout.controller_server --config FILE --socket PATH --run-dir DIR
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from luspo_megatron.config import Config
from luspo_megatron.config_io import load_config
from luspo_megatron.errors import RunError, UserError
from luspo_megatron.rollout.controller import Controller
from luspo_megatron.rollout.processes import be_owned
from luspo_megatron.rollout.wire import encode, read_message

log = logging.getLogger("controller")

WITH_PROGRESS = ("next_batch", "evaluate")


class Server:
    """Serves one client until it says ``close`` or its connection ends."""

    def __init__(self, config_path: str, run_dir: Path) -> None:
        self.config_path, self.run_dir = config_path, run_dir
        self.controller: Controller | None = None
        self.done = asyncio.Event()
        self._client_seen = False

    async def run(self, socket_path: Path) -> None:
        server = await asyncio.start_unix_server(self._serve_client, socket_path)
        socket_path.chmod(0o600)
        async with server:
            await self.done.wait()

    async def _serve_client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._client_seen:
            writer.close()
            return
        self._client_seen = True
        tasks: set[asyncio.Task[None]] = set()
        try:
            while (message := await read_message(reader)) is not None:
                task = asyncio.create_task(self._answer(message, writer))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
                if message["method"] == "close":
                    await task
                    break
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._close_controller()
            writer.close()
            self.done.set()

    async def _answer(self, message: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        number = message["id"]

        def stale() -> None:
            writer.write(encode({"stale": True}))

        def progress(phase: str, done: int, total: int) -> None:
            writer.write(encode({"id": number, "progress": {"phase": phase, "done": done, "total": total}}))

        try:
            answer: dict[str, Any] = {"id": number, "result": await self._call(message, progress, stale)}
        except (UserError, RunError) as error:
            kind = "UserError" if isinstance(error, UserError) else "RunError"
            answer = {"id": number, "error": {"kind": kind, "text": str(error)}}
        except Exception as error:  # a fault of ours: the traceback is in the log, the client gets one line
            log.exception("%s failed", message["method"])
            text = f"controller: {message['method']} failed: {type(error).__name__}: {error} (traceback in its log)"
            answer = {"id": number, "error": {"kind": "RunError", "text": text}}
        writer.write(encode(answer))
        await writer.drain()

    async def _call(self, message: dict[str, Any], progress: Any, stale: Callable[[], None]) -> Any:
        method, params = message["method"], message["params"]
        if method == "start":
            config = load_config(Config, ["--config", self.config_path])
            self.controller = await Controller.build(config, self.run_dir)
            self.controller.fleet.on_stale = stale
            return None
        if method == "close":
            return await self._close_controller()
        if self.controller is None or method not in Controller.METHODS:
            raise RunError(f"controller: no method {method!r} (or it is not started)")
        if method in WITH_PROGRESS:
            params = {**params, "progress": progress}
        return await getattr(self.controller, method)(**params)

    async def _close_controller(self) -> None:
        controller, self.controller = self.controller, None
        if controller is not None:
            await controller.close()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Rollout controller; started by the trainer's rank 0.")
    parser.add_argument("--config", required=True, help="resolved configuration (YAML)")
    parser.add_argument("--socket", type=Path, required=True, help="Unix socket to listen on")
    parser.add_argument("--run-dir", type=Path, required=True, help="run folder; logs go to its logs folder")
    args = parser.parse_args(argv)
    be_owned()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")

    async def run() -> None:
        await Server(args.config, args.run_dir).run(args.socket)

    asyncio.run(run())
    sys.stdout.flush()
    os._exit(0)  # nothing of ours is left; do not wait for library threads


if __name__ == "__main__":
    sys.exit(main())
