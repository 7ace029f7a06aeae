"""Command lines of the conversion tools. Exit codes: 0 done, 1 a checkpoint is wrong, 2 bad options, 130 Ctrl-C.

Heavy imports come after the options have been read, so that --help answers at once.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from luspo_megatron.errors import RunError, UserError

DTYPES = ("float32", "bfloat16", "float16")
UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}

TO_MEGATRON_HELP = """\
worked examples:
  # Qwen3-30B-A3B for training at TP2 PP2 EP8; then: luspo train --model.hf HF --model.megatron OUT ...
  hf_to_megatron.py --hf Qwen3-30B-A3B --out Qwen3-30B-A3B-megatron --tp 2 --pp 2 --ep 8 --workers 8

  # the same after the job was killed
  hf_to_megatron.py --hf Qwen3-30B-A3B --out Qwen3-30B-A3B-megatron --tp 2 --pp 2 --ep 8 --workers 8 --resume

  # a float32 model in bfloat16, on a login node, with one process
  hf_to_megatron.py --hf my-model --out my-model-megatron --dtype bfloat16 --workers 1
"""
TO_HF_HELP = """\
worked examples:
  # the newest checkpoint of a run; config and tokenizer come from the model that the run started from
  megatron_to_hf.py --megatron runs/luspo --out luspo-hf

  # one checkpoint, in bfloat16 and shards of 2 GB, with config and tokenizer of a folder
  megatron_to_hf.py --megatron runs/luspo/checkpoints/step-000100 --out luspo-hf --hf-config Qwen3-30B-A3B \\
      --dtype bfloat16 --shard-size 2GB

  # a converted folder back again, after the job was killed
  megatron_to_hf.py --megatron Qwen3-30B-A3B-megatron --out Qwen3-30B-A3B-back --workers 8 --resume
"""
VERIFY_HELP = """\
worked examples:
  # is what was converted what was downloaded?
  verify.py Qwen3-30B-A3B Qwen3-30B-A3B-megatron

  # has a folder changed since it was converted?
  verify.py Qwen3-30B-A3B-megatron

  # do transformers and the actor compute the same from the two sides? (small models: both in this process, float32)
  verify.py Qwen3-0.6B Qwen3-0.6B-megatron --logits
"""


def hf_to_megatron(argv: Sequence[str] | None = None) -> int:
    parser = _parser("hf_to_megatron.py", "Convert a Hugging Face folder to a Megatron checkpoint (torch_dist).",
                     TO_MEGATRON_HELP)
    parser.add_argument("--hf", required=True, metavar="DIR", help="folder with config.json and safetensors")
    parser.add_argument("--out", required=True, metavar="DIR", help="folder to make; must not exist")
    group = parser.add_argument_group(
        "layout", "A torch_dist checkpoint loads under any layout. These only decide how the vocabulary is padded "
        "(a multiple of 128 and of --tp) and how parameters are grouped into files (by pipeline stage and expert "
        "rank).")
    for name, what in (("tp", "tensor"), ("pp", "pipeline"), ("ep", "expert"), ("etp", "expert tensor")):
        group.add_argument(f"--{name}", type=int, default=1, metavar="N", help=f"{what} parallel size (default 1)")
    _common(parser)

    def run(args: Any) -> Any:
        from luspo_megatron.convert.to_megatron import Layout, convert

        layout = Layout(args.tp, args.pp, args.ep, args.etp)
        return convert(args.hf, args.out, layout, dtype=args.dtype, family=args.family,
                       workers=_workers(args), resume=args.resume, quiet=args.quiet)

    return _conversion(parser, argv, run)


def megatron_to_hf(argv: Sequence[str] | None = None) -> int:
    parser = _parser("megatron_to_hf.py", "Convert a Megatron checkpoint (torch_dist) to a Hugging Face folder.",
                     TO_HF_HELP)
    parser.add_argument("--megatron", required=True, metavar="DIR",
                        help="a converted folder, a training checkpoint (step-000010), a run folder (its newest "
                        "checkpoint), or a bare torch_dist folder; saved under any layout")
    parser.add_argument("--out", required=True, metavar="DIR", help="folder to make; must not exist")
    parser.add_argument("--hf-config", metavar="DIR", help="folder with config.json and tokenizer (default: the "
                        "checkpoint's own, or the model that the training started from)")
    parser.add_argument("--shard-size", type=_size, default=5 * 10**9, metavar="SIZE",
                        help="largest safetensors file, e.g. 500MB or 2GB (default 5GB)")
    _common(parser)

    def run(args: Any) -> Any:
        from luspo_megatron.convert.to_hf import convert

        return convert(args.megatron, args.out, hf_config=args.hf_config, shard_bytes=args.shard_size, dtype=args.dtype,
                       family=args.family, workers=_workers(args), resume=args.resume, quiet=args.quiet)

    return _conversion(parser, argv, run)


def verify(argv: Sequence[str] | None = None) -> int:
    parser = _parser("verify.py", "Compare two checkpoints of either kind tensor by tensor, bit by bit, and each with "
                     "its manifest (conversion.json). Exit 1 names what differs.", VERIFY_HELP)
    parser.add_argument("a", metavar="A", help="Hugging Face folder or Megatron checkpoint")
    parser.add_argument("b", metavar="B", nargs="?", help="another one; without it A is only checked by itself")
    parser.add_argument("--hf-config", metavar="DIR", help="config.json for a checkpoint that has none")
    _family(parser)
    parser.add_argument("--logits", action="store_true", help="also run a forward of both sides on the same tokens "
                        "(transformers and megatron-core, float32, one process)")
    parser.add_argument("--workers", type=int, metavar="N", help="processes (default: one per CPU, at most 8)")
    parser.add_argument("--quiet", action="store_true", help="no progress")

    def run(args: Any) -> int:
        from luspo_megatron.convert.tensors import listed
        from luspo_megatron.convert.verify import verify as compare

        if args.logits and args.b is None:
            raise UserError("--logits compares two checkpoints; name a second one")
        report = compare(args.a, args.b, hf_config=args.hf_config, family=args.family, workers=_workers(args),
                         quiet=args.quiet)
        if args.logits and not report.problems:
            from luspo_megatron.convert.logits import compare_logits

            compare_logits(args.a, args.b, args.hf_config, args.family, report)
        for note in report.notes:
            print(note)
        if report.problems:
            print(f"verify.py: {listed(report.problems, 20)}", file=sys.stderr)
            return 1
        print("ok")
        return 0

    return _guarded(parser, argv, run)


def _parser(name: str, what: str, examples: str) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(prog=name, description=what, epilog=examples,
                                   formatter_class=argparse.RawDescriptionHelpFormatter)


def _common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dtype", choices=DTYPES, help="convert to this dtype (default: as stored)")
    _family(parser)
    parser.add_argument("--workers", type=int, metavar="N", help="processes (default: one per CPU, at most 8)")
    parser.add_argument("--resume", action="store_true", help="go on with an interrupted conversion (OUT.partial)")
    parser.add_argument("--quiet", action="store_true", help="no progress")


def _family(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--family", default="", metavar="NAME", help="model.family, where config.json does not say it: "
                        "a known one, or module:attribute (a converted folder remembers it)")


def _workers(args: Any) -> int:
    from luspo_megatron.convert.pool import default_workers

    if args.workers is not None and args.workers < 1:
        raise UserError(f"--workers {args.workers}: must be at least 1")
    return args.workers or default_workers()


def _size(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)B?", text.strip().upper())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write 500MB or 2GB")
    return int(float(match[1]) * UNITS[match[2]])


def _conversion(parser: argparse.ArgumentParser, argv: Sequence[str] | None, run: Callable[[Any], Any]) -> int:
    def convert(args: Any) -> int:
        began = time.monotonic()
        import torch.distributed.checkpoint  # noqa: F401  # counted by itself, not as reading

        imported = time.monotonic() - began
        summary = run(args)
        for warning in summary.warnings:
            print(f"{parser.prog}: warning: {warning}", file=sys.stderr)
        if not summary.parts:
            print(f"{args.out}: complete already")
            return 0
        first, phases = summary.lines()
        print(f"{args.out}: {first}, verified\nimports {imported:.1f} s, {phases}")
        return 0

    return _guarded(parser, argv, convert)


def _guarded(parser: argparse.ArgumentParser, argv: Sequence[str] | None, run: Callable[[Any], int]) -> int:
    """A mistake or a bad checkpoint is one message and an exit code; faults of the program keep their traceback."""
    args = parser.parse_args(argv)
    try:
        return run(args)
    except (UserError, RunError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print(f"{parser.prog}: interrupted", file=sys.stderr)
        return 130
