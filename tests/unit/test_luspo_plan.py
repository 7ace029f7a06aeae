"""`luspo plan`: counts of published models, violations with mends, all shipped recipes, time, and no torch."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from luspo_megatron.errors import UserError
from luspo_megatron.parallel import ParallelLayout
from luspo_megatron.planning.batches import draw_lengths, parse_percentiles
from luspo_megatron.planning.plan import rank_grid
from luspo_megatron.planning.sizes import BufferSizes, _buffer, stage_sizes, whole_model
from luspo_megatron.planning.work import active_parameters
from luspo_megatron.weights.architecture import read_architecture
from luspo_megatron.weights.table import WeightTable

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
QWEN30 = EXAMPLES / "qwen3_moe/models/Qwen3-30B-A3B-Instruct-2507"
QWEN235 = EXAMPLES / "qwen3_moe/models/Qwen3-235B-A22B-Instruct-2507"
RECIPES = sorted(EXAMPLES.glob("*/luspo-*.yaml"))


def plan(*words: str) -> tuple[int, str, str]:
    done = subprocess.run([sys.executable, "-m", "luspo_megatron", "plan", *words], capture_output=True, text=True,
                          timeout=120, cwd=ROOT, check=False)
    return done.returncode, done.stdout, done.stderr


def config_of(recipe: Path) -> Path:
    return recipe.parent / yaml.safe_load(recipe.read_text())["model"]["hf"]


def test_published_counts() -> None:
    """30.532 B parameters in 18,867 tensors, 3.3 B of them active with the embedding; 235 B and 22 B."""
    table = WeightTable(read_architecture(QWEN30))
    assert whole_model(table) == (30_532_122_624, 18_867)
    assert len(table.hf_shapes) == 18_867
    assert active_parameters(table) + table.arch.vocab_size * table.arch.hidden == pytest.approx(3.35e9, rel=0.01)
    large = WeightTable(read_architecture(QWEN235))
    assert whole_model(large)[0] == pytest.approx(235.09e9, rel=1e-3)
    assert active_parameters(large) + large.arch.vocab_size * large.arch.hidden == pytest.approx(22.2e9, rel=0.01)


@pytest.mark.parametrize("layout", [ParallelLayout(8, 4, 1, 8, 1), ParallelLayout(16, 2, 2, 4, 1),
                                    ParallelLayout(64, 4, 2, 8, 2)])
def test_the_stages_hold_the_whole_model_once(layout: ParallelLayout) -> None:
    table = WeightTable(read_architecture(QWEN30))
    stages = stage_sizes(table, layout, distributed_optimizer=True)
    arch = table.arch
    # replicated over tp: norms and the router
    replicated = arch.num_layers * (2 * arch.hidden + 2 * arch.head_dim + arch.num_experts * arch.hidden) + arch.hidden
    padding = 0  # 151936 is a multiple of 128 * tp for the sizes here
    held = sum(layout.tp * s.dense.numel + layout.etp * layout.ep * s.expert.numel for s in stages)
    assert held == whole_model(table)[0] + (layout.tp - 1) * replicated + padding
    for stage in stages:
        assert sum(stage.dense.shards) == stage.dense.numel and sum(stage.expert.shards) == stage.expert.numel


def test_a_buffer_by_hand() -> None:
    """Sizes 100, 30, 200 over two ranks: starts at 0, 128, 192; ends at 392 -> 512; halves of 256."""
    assert _buffer([100, 30, 200], 2, True) == BufferSizes(330, 512, (100 + 30 + 64, 136))
    assert _buffer([100, 30, 200], 2, False) == BufferSizes(330, 330, (330, 330))


def test_rank_grid() -> None:
    rows = rank_grid(ParallelLayout(64, 4, 2, 32, 1), 8)
    assert len(rows) == 8
    assert rows[0] == {"ranks": (0, 7), "tp": (0, 3), "cp": (0, 0), "dp": (0, 1), "pp": (0, 0), "ep": (0, 7)}
    assert rows[7] == {"ranks": (56, 63), "tp": (0, 3), "cp": (0, 0), "dp": (6, 7), "pp": (1, 1), "ep": (24, 31)}


def test_percentiles() -> None:
    points = parse_percentiles("50:100,100:300", 1000)
    lengths = sorted(draw_lengths(points, 1000))
    assert lengths[0] >= 25 and lengths[-1] <= 300 and abs(lengths[500] - 100) <= 1 and abs(lengths[750] - 200) <= 1
    for bad in ("x", "50", "50:100,40:200", "50:100,60:90", "120:5"):
        with pytest.raises(UserError, match="rising pairs"):
            parse_percentiles(bad, 1000)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_plans_and_fits(recipe: Path) -> None:
    nodes = re.search(r"-(\d+)n8g", recipe.stem)
    assert nodes is not None
    code, out, err = plan(str(recipe), "--model.hf", str(config_of(recipe)), "--nodes", nodes[1], "--json")
    assert code == 0, out + err
    found = json.loads(out)
    assert found["violations"] == [] and found["fits"]
    assert found["layout"]["nodes"] + found["layout"]["engine_nodes"] == int(nodes[1])
    assert found["batch"]["mini_batches"] > 1
    assert found["sync"]["bytes"] == pytest.approx(2 * found["model"]["parameters"], rel=1e-3)


def test_the_text_shows_every_section() -> None:
    code, out, _ = plan(str(EXAMPLES / "qwen3_moe/luspo-qwen3_235b_a22b-16n8g.yaml"), "--model.hf", str(QWEN235))
    assert code == 0
    for words in ("235.09", "rank grid", "batch plan", "memory of one GPU", "weight sync", "estimate of a step",
                  "assumes", "It fits.", "not on this machine"):
        assert words in out


def test_colocated_trainers_need_host_memory_for_what_they_lend() -> None:
    """Parameters and optimizer of 8 ranks of one node, while engines of the same GPUs generate."""
    recipe = str(EXAMPLES / "qwen3_moe/luspo-qwen3_30b_a3b-4n8g.yaml")
    found = json.loads(plan(recipe, "--model.hf", str(QWEN30), "--json")[1])
    apart = json.loads(plan(recipe, "--model.hf", str(QWEN30), "--json", "--launch.engine_nodes", "4")[1])
    stage = found["stages"][0]
    assert found["host_per_node"] - apart["host_per_node"] == 8 * (stage["parameters"] + stage["optimizer"])
    assert [place["node"] for place in apart["places"]] == [4, 4, 5, 5, 6, 6, 7, 7]
    assert [place["ranks"] for place in found["places"]][:2] == [[0, 3], [4, 7]]


def test_engines_over_two_nodes() -> None:
    """Half of an engine's GPUs on each of two nodes in a row; its weights cut over all of them."""
    recipe = str(EXAMPLES / "qwen3_moe/luspo-qwen3_235b_a22b-16n8g.yaml")
    flags = (recipe, "--model.hf", str(QWEN235), "--json", "--rollout.engine_args", " --tp-size 16 --nnodes 2",
             "--rollout.num_engines")
    apart = json.loads(plan(*flags, "4")[1])
    assert apart["violations"] == [] and apart["layout"]["nodes"] == 8
    assert [(place["engine"], place["node"]) for place in apart["places"]] == [(i // 2, 8 + i) for i in range(8)]
    assert apart["engine"]["weights"] == 2 * apart["model"]["parameters"] // 16
    beside = json.loads(plan(*flags, "3", "--launch.engine_nodes", "0")[1])
    assert [(place["engine"], place["node"]) for place in beside["places"]] == [(i // 2, i) for i in range(6)]
    assert beside["places"][3]["gpus"] == [0, 7] and beside["places"][3]["ranks"] == [24, 31]
    for number, nodes, message in (("1", "3", "engines over 2 nodes each cannot share 3 engine nodes"),
                                   ("1", "1", "engines of 16 GPUs need 16, there are 8"),
                                   ("1", "4", "take at least 2")):
        code, out, err = plan(*flags, number, "--launch.engine_nodes", nodes)
        assert code == 2 and message in out + err, (out[-300:], err)


def test_engines_that_stay_in_memory_beside_the_trainers() -> None:
    """Without the hand-over both are counted in every moment, and nothing is lent to the host."""
    recipe = str(EXAMPLES / "qwen3_moe/luspo-qwen3_30b_a3b-4n8g.yaml")
    turns = json.loads(plan(recipe, "--model.hf", str(QWEN30), "--json")[1])
    both = json.loads(plan(recipe, "--model.hf", str(QWEN30), "--json", "--rollout.hand_over", "off")[1])
    engine, stage = both["engine"], both["stages"][0]
    size = {name: {m["moment"]: m["bytes"] for m in found["moments"]} for name, found in (("turns", turns),
                                                                                         ("both", both))}
    assert size["both"]["train"] - size["turns"]["train"] == engine["weights"] + engine["cache"] > 0
    assert size["both"]["generate"] - size["turns"]["generate"] == \
        stage["parameters"] + stage["gradients"] + stage["optimizer"]
    assert turns["fits"] and not both["fits"]
    assert turns["host_per_node"] - both["host_per_node"] == 8 * (stage["parameters"] + stage["optimizer"])
    text = plan(recipe, "--model.hf", str(QWEN30), "--rollout.hand_over", "off")[1]
    assert "on the trainers' GPUs, both in memory all the time (rollout.hand_over off)" in text


def test_all_violations_at_once_with_mends() -> None:
    code, out, _ = plan("--model.hf", str(QWEN30), "--data.prompts", "x.jsonl", "--parallel.world_size", "12",
                        "--parallel.tp", "3", "--parallel.pp", "5", "--parallel.ep", "7", "--optimizer.lr", "0")
    assert code == 2
    for flag in ("--parallel.tp 3", "--parallel.pp 5", "--parallel.ep 7", "--parallel.world_size 12", "--optimizer.lr"):
        assert f"violation: {flag}" in out
    assert "take one of 1, 2, 4" in out


def test_what_does_not_fit_is_said() -> None:
    code, out, _ = plan(str(EXAMPLES / "qwen3_moe/luspo-qwen3_30b_a3b-1n8g.yaml"), "--model.hf", str(QWEN30),
                        "--optimizer.cpu_offload", "false", "--gpu-memory", "40")
    assert code == 1 and "NO" in out and "It does not fit" in out


def test_no_torch_and_quick() -> None:
    """16 nodes in seconds of processor time; wall time depends on who else computes."""
    script = ("import sys, time; from luspo_megatron.planning.plan import main; "
              f"code = main(['{EXAMPLES}/qwen3_moe/luspo-qwen3_235b_a22b-16n8g.yaml', '--model.hf', '{QWEN235}']); "
              "assert code == 0; assert 'torch' not in sys.modules; assert 'megatron' not in sys.modules; "
              "print('SECONDS', time.process_time())")
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, cwd=ROOT,
                          check=True)
    assert float(done.stdout.split("SECONDS")[1]) < 5
