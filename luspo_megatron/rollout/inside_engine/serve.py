"""Starts a vLLM or SGLang server as an owned process: python serve.py vllm --port-file FILE -- ENGINE FLAGS

Runs under the engine's Python, standard library only. It gives the server a free port on loopback unless the flags say
otherwise, puts this package (a link to it, nothing else of the environment it lives in) and what makes SGLang find our
plugin on the server's path, and writes the URL to FILE when the port answers. With --owned it ends when its standard
input closes; however it ends, the server and all the server's own processes end too.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

MODULES = {"vllm": "vllm.entrypoints.openai.api_server", "sglang": "sglang.launch_server"}
PART_MODULES = MODULES | {"vllm": "luspo_megatron.rollout.inside_engine.vllm_part"}
PACKAGE = Path(__file__).resolve().parents[2]
GRACE = 4.0  # seconds from asking the server to end to killing it; less than the owner's patience with us
_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG


def flag_value(flags: list[str], name: str) -> str | None:
    """The value of ``--name V`` or ``--name=V``, the last one given."""
    found = None
    for index, word in enumerate(flags):
        if word == name and index + 1 < len(flags):
            found = flags[index + 1]
        elif word.startswith(name + "="):
            found = word[len(name) + 1 :]
    return found


def make_overlay(folder: Path, engine: str, token: str) -> None:
    """What the server's path needs: the package, and for SGLang the plugin's entry point and the token's file."""
    (folder / "luspo_megatron").symlink_to(PACKAGE)
    if engine == "sglang":
        info = folder / "luspo_engine_plugin-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: luspo-engine-plugin\nVersion: 1.0\n")
        target = "luspo_megatron.rollout.inside_engine.sglang_plugin:register"
        (info / "entry_points.txt").write_text(f"[sglang.srt.plugins]\nluspo = {target}\n")
        if token:  # not a flag: other users of the machine can read those
            config = folder / "token.yaml"
            config.touch(0o600)
            config.write_text(f'api-key: "{token}"\n')


def environment(folder: Path, engine: str, flags: list[str]) -> dict[str, str]:
    """The server's variables; what the person has set wins."""
    on_cpu = os.environ.get("LUSPO_PLATFORM") == "cpu"
    path = [str(folder)]
    defaults = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    if engine == "vllm":
        defaults |= {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
        if on_cpu:
            defaults |= {"VLLM_CPU_KVCACHE_SPACE": "1", "TORCHDYNAMO_DISABLE": "1"}
    elif flag_value(flags, "--device") == "cpu":
        path.append(str(PACKAGE / "rollout/inside_engine/sglang_cpu"))
        defaults |= {"SGLANG_USE_CPU_ENGINE": "1", "LUSPO_SGLANG_CPU": "1"}
    path += [part for part in os.environ.get("LUSPO_ENGINE_PYTHONPATH", "").split(os.pathsep) if part]
    out = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return {**defaults, **out, "PYTHONPATH": os.pathsep.join(path)}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def answers(host: str, port: int) -> bool:
    try:
        with socket.create_connection((host, port), timeout=1.0):
            return True
    except OSError:
        return False


def publish(port_file: Path, url: str) -> None:
    partial = port_file.with_suffix(".tmp")
    partial.write_text(url)
    partial.replace(port_file)


def die_with_parent() -> None:
    """In the child before it becomes the server."""
    ctypes.CDLL(None).prctl(_DEATH_SIGNAL, signal.SIGKILL)


def wait_for_end(server: subprocess.Popen[bytes], stop: threading.Event, port_file: Path | None, host: str, port: int,
                 url: str) -> int:
    """Until the server ends or ``stop`` is set; the exit code for us. ``port_file`` None: nobody is to know the URL."""
    published = False
    while not stop.is_set():
        code = server.poll()
        if code is not None:
            print(f"the engine ended with {code}", flush=True)
            return code if code > 0 else 1
        if port_file is not None and not published and answers(host, port):
            publish(port_file, url)
            published = True
        stop.wait(0.2)
    server.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        server.wait(GRACE)
    return 0


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Start an engine server as an owned process.")
    parser.add_argument("engine", choices=sorted(MODULES))
    parser.add_argument("--port-file", type=Path, required=True, help="where the URL is written once it listens")
    parser.add_argument("--part", action="store_true", help="of an engine whose server is on another node")
    parser.add_argument("--owned", action="store_true", help="end when standard input closes, not on signals")
    words = sys.argv[1:] if argv is None else argv
    ours = words.index("--") if "--" in words else len(words)
    args = parser.parse_args(words[:ours])
    flags = words[ours + 1 :]

    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, (lambda *_: None) if args.owned else (lambda *_: stop.set()))
    if args.owned:

        def watch() -> None:
            with contextlib.suppress(OSError):
                while os.read(0, 4096):
                    pass
            stop.set()

        threading.Thread(target=watch, name="owner-watch", daemon=True).start()

    host = flag_value(flags, "--host") or "127.0.0.1"
    port = int(flag_value(flags, "--port") or free_port())
    folder = Path(tempfile.mkdtemp(prefix="luspo-engine-"))
    try:
        token = os.environ.get("LUSPO_ENGINE_TOKEN", "")
        make_overlay(folder, args.engine, token)
        config = ["--config", str(folder / "token.yaml")] if (folder / "token.yaml").exists() else []
        module = (PART_MODULES if args.part else MODULES)[args.engine]
        command = [sys.executable, "-m", module, *config, "--host", host, "--port", str(port), *flags]
        server = subprocess.Popen(command, stdin=subprocess.DEVNULL, env=environment(folder, args.engine, flags),
                                  preexec_fn=die_with_parent)  # noqa: PLW1509 - we have no locks at this point
        everywhere = host in ("0.0.0.0", "::")
        url = f"http://{socket.gethostname() if everywhere else host}:{port}"
        code = wait_for_end(server, stop, None if args.part else args.port_file, "127.0.0.1" if everywhere else host,
                            port, url)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if args.owned:  # we lead a session of our own: take what the server has left behind with us
        print("ending the engine's processes", flush=True)
        sys.stdout.flush()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(0, signal.SIGTERM)
        time.sleep(0.3)
    return code


if __name__ == "__main__":
    sys.exit(main())
