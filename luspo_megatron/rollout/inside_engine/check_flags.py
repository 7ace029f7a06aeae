"""Has the engine's own parser read a server's flags: python check_flags.py vllm -- ENGINE FLAGS

Runs under the engine's Python, without a model and without a GPU. Exit code 2 with the parser's message for flags that
it does not take, 3 where the engine is not installed. Left out: what the engine finds out only from the model.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

NOT_INSTALLED = 3  # exit code
PARSERS = ("vllm.entrypoints.launchers.cli_args", "vllm.entrypoints.openai.cli_args")  # by age, the newest first


def vllm_parser() -> Any:
    from vllm.utils import argparse_utils

    for name in PARSERS:
        try:
            return importlib.import_module(name).make_arg_parser(argparse_utils.FlexibleArgumentParser())
        except ModuleNotFoundError as error:
            if error.name is None or not name.startswith(error.name):
                raise
    raise ModuleNotFoundError(f"none of {', '.join(PARSERS)}")


def sglang_parser() -> Any:
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser(prog="sglang")
    ServerArgs.add_cli_args(parser)
    return parser


def main(words: list[str]) -> int:
    engine, flags = words[0], words[words.index("--") + 1 :]
    # SGLang imports CUDA kernels at once; the stand-ins for the CPU serve where there is no GPU
    if engine == "sglang" and os.environ.get("LUSPO_PLATFORM") == "cpu":
        sys.path.append(str(Path(__file__).parent / "sglang_cpu"))
    if importlib.util.find_spec(engine) is None:
        return NOT_INSTALLED
    parser = vllm_parser() if engine == "vllm" else sglang_parser()
    parser.parse_args(flags)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
