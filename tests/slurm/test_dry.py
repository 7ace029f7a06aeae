"""Every shipped sbatch script on a cluster, everything but the model: plan, node split, srun, every rank finds rank 0.

Node names n1..n16 resolve nowhere, and every job is submitted from a folder that is not the project's.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from luspo_megatron.launch.allocation import expand_nodes
from tests.slurm.conftest import ROOT, Cluster

EXAMPLES = ROOT / "examples"
MODELS = {"qwen3_30b": "qwen3_moe/models/Qwen3-30B-A3B-Instruct-2507",
          "qwen3_235b": "qwen3_moe/models/Qwen3-235B-A22B-Instruct-2507", "qwen2_5_7b": "qwen2_5/models/Qwen2.5-7B"}
RECIPES = {  # script -> trainer nodes, engine nodes
    "qwen3_moe/luspo-qwen3_30b_a3b-1n8g": (1, 0),
    "qwen3_moe/luspo-qwen3_30b_a3b-4n8g": (4, 0),
    "qwen3_moe/luspo-qwen3_30b_a3b-4n8g-disaggregated": (2, 2),
    "qwen3_moe/luspo-qwen3_235b_a22b-16n8g": (8, 8),
    "qwen2_5/luspo-qwen2_5_7b-1n8g": (1, 0),
}
pytestmark = [pytest.mark.slurm, pytest.mark.timeout(600)]


def data(folder: Path) -> Path:
    for name in ("dapo-math-17k", "aime24"):
        (folder / f"{name}.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    return folder


def model_of(recipe: str) -> str:
    return str(EXAMPLES / next(path for name, path in MODELS.items() if name in recipe))


def dry(recipe: str, folder: Path) -> dict[str, str]:
    return {"LUSPO_DRY_RUN": "1", "MODEL": model_of(recipe), "DATA": str(data(folder)), "RUN_DIR": str(folder / "run")}


def test_every_recipe_is_here() -> None:
    found = {str(path.relative_to(EXAMPLES).with_suffix("")) for path in EXAMPLES.glob("*/luspo-*.sbatch")}
    assert found == set(RECIPES)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("engine", ["sglang"])
def test_a_recipe(cluster: Cluster, recipe: str, engine: str, tmp_path: Path) -> None:
    trainers, engines = RECIPES[recipe]
    job = cluster.submit(EXAMPLES / f"{recipe}.sbatch", tmp_path / "out", cwd=tmp_path, ENGINE=engine,
                         **dry(recipe, tmp_path))
    assert job.wait() == "COMPLETED", job.said
    assert "It fits." in job.said
    assert f"dry run: {8 * trainers} ranks on {trainers} nodes have found each other" in job.said
    lines = re.findall(r"  (n\d+): ranks (\d+)-(\d+) \(8\), GPUs 0,1,2,3,4,5,6,7\n", job.said)
    nodes = expand_nodes(job.field("NodeList"))
    assert len(nodes) == trainers + engines
    # the first allocated nodes train, in order, and hold blocks of ranks
    assert lines == [(node, str(8 * i), str(8 * i + 7)) for i, node in enumerate(nodes[:trainers])]
    # and the last ones are for engines: a task on each
    found = re.findall(r"dry run: engines on (n\d+), GPUs 0,1,2,3,4,5,6,7\n", job.said)
    assert sorted(found) == sorted(nodes[trainers:])
    assert job.out.parent == tmp_path and not list(ROOT.glob("*.out"))


def test_an_allocation_of_another_size_is_refused_with_the_mend(cluster: Cluster, tmp_path: Path) -> None:
    recipe = "qwen3_moe/luspo-qwen3_30b_a3b-4n8g"
    job = cluster.submit(EXAMPLES / f"{recipe}.sbatch", tmp_path / "out", cwd=tmp_path, options=("--nodes=3",),
                         **dry(recipe, tmp_path))
    assert job.wait() == "FAILED" and job.field("ExitCode") == "2:0"
    assert "the allocation has 3 nodes, the run needs 4" in job.said and "--nodes=4" in job.said


def test_three_nodes(cluster: Cluster, tmp_path: Path) -> None:
    recipe = "qwen3_moe/luspo-qwen3_30b_a3b-1n8g"
    flags = ("--parallel.world_size", "24", "--rollout.num_engines", "6", "--parallel.ep", "4")
    job = cluster.submit(EXAMPLES / f"{recipe}.sbatch", tmp_path / "out", *flags, cwd=tmp_path, options=("--nodes=3",),
                         **dry(recipe, tmp_path))
    assert job.wait() == "COMPLETED", job.said
    assert "dry run: 24 ranks on 3 nodes have found each other" in job.said


@pytest.mark.parametrize(("script", "words"), [("convert", "luspo export --checkpoint"),
                                               ("eval", "luspo eval --model.hf")])
def test_the_scripts_around_a_run(cluster: Cluster, script: str, words: str, tmp_path: Path) -> None:
    job = cluster.submit(EXAMPLES / f"qwen3_moe/{script}.sbatch", tmp_path / "out", cwd=tmp_path, LUSPO_DRY_RUN="1",
                         RUN_DIR="runs/x", MODEL="runs/x/export")
    assert job.wait() == "COMPLETED", job.said
    assert f"dry run: {words} runs/x" in job.said


@pytest.mark.parametrize("text", ["n1", "n[1-3]", "n[2,5-7,16]", "a[01-03]-x,login", "r[1-2]c[08-10]"])
def test_node_lists_as_slurm_reads_them(cluster: Cluster, text: str) -> None:
    assert expand_nodes(text) == cluster.slurm("scontrol", "show", "hostnames", text).split()
