"""The engines' own argument parsers take the command lines that we make, and name the flags that we look for."""

from __future__ import annotations

import json
import subprocess

import pytest

from luspo_megatron.engine_layout import SPELLINGS, SWITCHES, engine_layout
from luspo_megatron.rollout.engine import EngineStart, load_engine_kind
from luspo_megatron.rollout.vllm_client import CPU_HEAD_DIMS
from tests.engines.conftest import ROOT, python_of

INSIDE = ROOT / "luspo_megatron/rollout/inside_engine"
PARSE = """
import json, sys
sys.path.append(sys.argv[1])
import check_flags
parser = getattr(check_flags, sys.argv[2] + "_parser")()
"""
LOOK = """
lines = json.load(sys.stdin)
spellings = {option: action.dest for action in parser._actions for option in action.option_strings}
found = [{k: v for k, v in vars(parser.parse_args(words)).items() if isinstance(v, (int, float, str, bool))}
         for words in lines]
print("\\n" + json.dumps([spellings, found]))
"""
LARGE = {  # the flags of a large engine: (its own, what they make of it)
    "vllm": (["--tensor-parallel-size", "4", "--data-parallel-size", "2", "--enable-expert-parallel",
              "--gpu-memory-utilization", "0.85"], {"tp": 4, "dp": 2, "ep": 8, "workers": 8}),
    "sglang": (["--tp-size", "16", "--ep-size", "16", "--dp-size", "4", "--enable-dp-attention", "--nnodes", "2",
                "--mem-fraction-static", "0.85"], {"tp": 16, "dp": 4, "ep": 16, "nodes": 2, "workers": 16}),
}
DESTINATIONS = {
    "vllm": {"tp": "tensor_parallel_size", "pp": "pipeline_parallel_size", "dp": "data_parallel_size",
             "nodes": "nnodes"},
    "sglang": {"tp": "tp_size", "pp": "pp_size", "dp": "dp_size", "ep": "ep_size", "nodes": "nnodes"},
}


def ask(engine: str, lines: list[list[str]]) -> tuple[dict[str, str], list[dict[str, object]]]:
    done = subprocess.run([python_of(engine), "-c", PARSE + LOOK, str(INSIDE), engine], input=json.dumps(lines),
                          text=True, capture_output=True, timeout=250, check=False,
                          env={"PATH": "/usr/bin:/bin", "HOME": "/tmp", "HF_HUB_OFFLINE": "1"})
    assert done.returncode == 0, done.stderr[-3000:]
    spellings, found = json.loads(done.stdout.strip().splitlines()[-1])
    return spellings, found


def command(engine: str, **settings: object) -> list[str]:
    """The engine's part of the command line."""
    start = EngineStart("/models/x", "bfloat16", 1, 256, "/tmp/url", **settings)  # type: ignore[arg-type]
    words = load_engine_kind(engine).command(start)
    return words[words.index("--") + 1 :]


def test_head_dims_of_vllm_on_a_cpu() -> None:
    """The list is vLLM's own."""
    look = ("from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend as B\n"
            "print('sizes', *B.get_supported_head_sizes())")
    done = subprocess.run([python_of("vllm"), "-c", look], text=True, capture_output=True, timeout=250, check=True,
                          env={"PATH": "/usr/bin:/bin", "HOME": "/tmp"})
    assert tuple(map(int, done.stdout.split("sizes", 1)[1].split())) == CPU_HEAD_DIMS


TWO_NODES = {
    "vllm": ("--nnodes 2 -tp 16 --enable-expert-parallel", {"nnodes": 2, "node_rank": 1, "master_addr": "10.0.0.7",
                                                            "master_port": 7001}),
    "sglang": ("--nnodes 2 --tp 16 --ep 16", {"nnodes": 2, "node_rank": 1, "dist_init_addr": "10.0.0.7:7001"}),
}


@pytest.mark.timeout(300)
def test_the_part_of_an_engine_over_two_nodes(engine: str) -> None:
    """That it is started so, and joins its engine, is test_two_nodes.py's."""
    flags, want = TWO_NODES[engine]
    words = command(engine, on_cpu=False, args=tuple(flags.split()), rendezvous="10.0.0.7:7001", part=1)
    _, [found] = ask(engine, [words])
    assert {name: found[name] for name in want} == want
    assert engine_layout(engine, flags.split()).workers_per_node == 8


@pytest.mark.timeout(300)
def test_command_lines_and_spellings(engine: str) -> None:
    large, sizes = LARGE[engine]
    lines = [command(engine), command(engine, on_cpu=False, max_length=4096, host="10.0.0.7", args=tuple(large)),
             command(engine, on_cpu=False, routed_experts=True, top_p=0.7, sleeps=True, args=("--port", "7000"))]
    known, _ = ask(engine, [])  # versions before have had more spellings
    asked = [(what, DESTINATIONS[engine][what], option) for what, options in SPELLINGS[engine].items()
             for option in options if option in known]
    spellings, found = ask(engine, lines + [[*lines[0], option, "2"] for *_, option in asked])
    length = {"vllm": "max_model_len", "sglang": "context_length"}[engine]
    sleeps = {"vllm": "enable_sleep_mode", "sglang": "enable_memory_saver"}[engine]
    assert found[2][sleeps] is True and not found[1][sleeps]
    assert found[1][length] == 4096 and found[1]["host"] == "10.0.0.7" and found[2]["port"] == 7000
    layout = engine_layout(engine, large)
    assert {name: getattr(layout, name) for name in sizes} == sizes
    for what, destination in DESTINATIONS[engine].items():
        ours = {option for option, where in spellings.items() if where == destination}
        assert ours <= set(SPELLINGS[engine][what]), "the engine knows a spelling that engine_layout does not"
        if what in sizes and what != "ep":
            assert found[1][destination] == sizes[what]
    for (_, destination, option), values in zip(asked, found[3:], strict=True):
        assert values[destination] == 2, option
    assert all(option in spellings for option in SWITCHES[engine])
