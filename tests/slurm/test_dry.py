"""Every shipped sbatch script on a cluster, everything but the model: plan, node split, srun, every rank finds rank 0.

Node names n1..n16 resolve nowhere, every job is submitted from a folder that is not the project's, and the project is
reached through a path with spaces.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from luspo_megatron.config import Config
from luspo_megatron.config_io import load_config
from luspo_megatron.launch.allocation import expand_nodes
from tests.slurm.conftest import ROOT, Cluster, Job

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
OTHERS = {"qwen3_moe/convert", "qwen3_moe/eval", "qwen3_moe/tiny_cpu"}
pytestmark = [pytest.mark.slurm, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def examples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project's examples, by another path."""
    link = tmp_path_factory.mktemp("a shared disk") / "my project"
    link.symlink_to(ROOT)
    return link / "examples"


def data(folder: Path) -> Path:
    for name in ("dapo-math-17k", "aime24"):
        (folder / f"{name}.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    return folder


def model_of(recipe: str) -> str:
    """Its published config.json, which is all that a dry run needs."""
    return next((str(EXAMPLES / path) for name, path in MODELS.items() if name in recipe), "")


def submit(cluster: Cluster, examples: Path, recipe: str, folder: Path, *flags: str, options: tuple[str, ...] = (),
           **environment: str) -> Job:
    settings = {"LUSPO_DRY_RUN": "1", "MODEL": model_of(recipe), "DATA": str(data(folder)),
                "RUN_DIR": str(folder / "a run")}
    return cluster.submit(examples / f"{recipe}.sbatch", folder / "out", *flags, cwd=folder, options=options,
                          **settings | environment)


def test_every_script_is_here() -> None:
    found = {str(path.relative_to(EXAMPLES).with_suffix("")) for path in EXAMPLES.glob("*/*.sbatch")}
    assert found == set(RECIPES) | OTHERS


@pytest.mark.parametrize(("recipe", "engine"), [
    *((recipe, "sglang") for recipe in RECIPES), ("qwen3_moe/luspo-qwen3_30b_a3b-4n8g-disaggregated", "vllm")])
def test_a_recipe(cluster: Cluster, examples: Path, recipe: str, engine: str, tmp_path: Path) -> None:
    trainers, engines = RECIPES[recipe]
    python = Path(os.environ.get("ENGINE_VENVS") or ROOT / ".venv-engines") / engine / "bin/python"
    there = {"ENGINE_PYTHON": str(python)} if python.exists() else {}
    job = submit(cluster, examples, recipe, tmp_path, ENGINE=engine, **there)
    assert job.wait() == "COMPLETED", job.said
    assert ("its own parser takes its flags" if there else "its flags are not checked") in job.said
    assert "It fits." in job.said
    assert f"dry run: {8 * trainers} ranks on {trainers} nodes have found each other" in job.said
    lines = re.findall(r"  (n\d+): ranks (\d+)-(\d+) \(8\), GPUs 0,1,2,3,4,5,6,7\n", job.said)
    nodes = expand_nodes(job.field("NodeList"))
    assert len(nodes) == trainers + engines
    # the first allocated nodes train, in order, and hold blocks of ranks
    assert lines == [(node, str(8 * i), str(8 * i + 7)) for i, node in enumerate(nodes[:trainers])]
    # the last ones are for engines, a task on each; without such nodes the trainers' nodes have one each
    found = re.findall(r"dry run: engines on (n\d+), GPUs 0,1,2,3,4,5,6,7\n", job.said)
    assert sorted(found) == sorted(nodes[trainers:] or (nodes if trainers > 1 else []))
    assert job.out.parent == tmp_path and not list(ROOT.glob("*.out"))
    assert engine in job.said


def test_an_engine_over_two_nodes(cluster: Cluster, examples: Path, tmp_path: Path) -> None:
    job = submit(cluster, examples, "qwen3_moe/luspo-qwen3_30b_a3b-4n8g-disaggregated", tmp_path,
                 "--rollout.num_engines", "1", "--rollout.engine_args", " --tp-size 16 --nnodes 2")
    assert job.wait() == "COMPLETED", job.said
    nodes = expand_nodes(job.field("NodeList"))
    assert re.findall(r"engine 0: node (\d), GPUs 0-7", job.said) == ["2", "3"]
    assert sorted(re.findall(r"dry run: engines on (n\d+)", job.said)) == sorted(nodes[2:])


def test_an_allocation_of_another_size_is_refused_with_the_mend(cluster: Cluster, examples: Path,
                                                               tmp_path: Path) -> None:
    job = submit(cluster, examples, "qwen3_moe/luspo-qwen3_30b_a3b-4n8g", tmp_path, options=("--nodes=3",))
    assert job.wait() == "FAILED" and job.field("ExitCode") == "2:0"
    assert "the allocation has 3 nodes, the run needs 4" in job.said and "--nodes=4" in job.said


def test_three_nodes_of_a_list_with_a_gap(cluster: Cluster, examples: Path, tmp_path: Path) -> None:
    """field case: a node list read as one name. The first node is the master, the others follow in order."""
    flags = ("--parallel.world_size", "24", "--rollout.num_engines", "6", "--parallel.ep", "4")
    job = submit(cluster, examples, "qwen3_moe/luspo-qwen3_30b_a3b-1n8g", tmp_path, *flags,
                 options=("--nodes=3", "--nodelist=n4,n6,n9"))
    assert job.wait() == "COMPLETED", job.said
    assert job.field("NodeList") == "n[4,6,9]"
    assert "24 ranks on n4, n6, n9; master 127.0.0.1:" in job.said  # n4 resolves nowhere: its NodeAddr
    assert "dry run: 24 ranks on 3 nodes have found each other" in job.said
    assert re.findall(r"  (n\d+): ranks (\d+)-(\d+)", job.said) == [("n4", "0", "7"), ("n6", "8", "15"),
                                                                     ("n9", "16", "23")]


def test_an_array_of_seeds(cluster: Cluster, examples: Path, tmp_path: Path) -> None:
    """An array's first task sees the commands of all tasks; each finds the recipe, its seed and its folder."""
    job = submit(cluster, examples, "qwen3_moe/luspo-qwen3_30b_a3b-1n8g", tmp_path, options=("--array=3-4",))
    job.until(lambda: job.said.count("have found each other") == 2, 120)
    for seed in (3, 4):
        folder = tmp_path / f"a run/seed-{seed}"
        config = load_config(Config, ["--config", str(folder / "logs/config.yaml")])
        assert config.run.seed == seed and config.run.dir == str(folder)


def test_a_flag_that_does_not_exist_ends_the_job_at_once(cluster: Cluster, examples: Path, tmp_path: Path) -> None:
    job = submit(cluster, examples, "qwen3_moe/luspo-qwen3_30b_a3b-1n8g", tmp_path, "--optimizer.lrr", "1")
    assert job.wait() == "FAILED" and job.field("ExitCode") == "2:0"
    assert "--optimizer.lr" in job.said and "Traceback" not in job.said


def test_the_tiny_run(cluster: Cluster, examples: Path, tmp_path: Path) -> None:
    job = submit(cluster, examples, "qwen3_moe/tiny_cpu", tmp_path)
    assert job.wait() == "COMPLETED", job.said
    assert "dry run: 4 ranks on 2 nodes have found each other; layout tp2xdp2xep2" in job.said


def test_evaluation(cluster: Cluster, examples: Path, tmp_path: Path) -> None:
    prompts = data(tmp_path) / "aime24.jsonl"
    job = submit(cluster, examples, "qwen3_moe/eval", tmp_path, MODEL=model_of("qwen3_30b"), PROMPTS=str(prompts),
                 OUT=str(tmp_path / "results"))
    assert job.wait() == "COMPLETED", job.said
    assert "dry run: would evaluate" in job.said and not (tmp_path / "results").exists()


@pytest.mark.parametrize(("source", "words"), [("HF", "hf_to_megatron.py' '--hf'"),
                                               ("MEGATRON", "megatron_to_hf.py' '--megatron'")])
def test_conversion(cluster: Cluster, examples: Path, source: str, words: str, tmp_path: Path) -> None:
    folder = tmp_path / "from here"
    folder.mkdir()
    job = submit(cluster, examples, "qwen3_moe/convert", tmp_path, OUT=str(tmp_path / "to there"),
                 **{source: str(folder)})
    assert job.wait() == "COMPLETED", job.said
    assert f"{words} '{folder}'" in job.said and "verify.py" in job.said and not (tmp_path / "to there").exists()


def test_a_real_conversion_and_its_repetition(cluster: Cluster, examples: Path, tmp_path: Path) -> None:
    from tests.tiny import save_model

    model = save_model(tmp_path / "model", "moe", layers=2)
    settings = {"LUSPO_DRY_RUN": "0", "HF": str(model), "OUT": str(tmp_path / "out of it"), "WORKERS": "1"}
    for _ in range(2):  # a requeued job finds its folder
        job = submit(cluster, examples, "qwen3_moe/convert", tmp_path, "--dtype", "bfloat16", **settings)
        assert job.wait() == "COMPLETED", job.said
    assert (tmp_path / "out of it").is_dir()


def test_a_script_outside_slurm(cluster: Cluster, tmp_path: Path) -> None:
    """The same on this machine alone."""
    env = cluster.environment | {"LUSPO_DRY_RUN": "1", "RUN_DIR": str(tmp_path / "run"), "WORLD_SIZE": "2", "TP": "1"}
    done = subprocess.run(["bash", EXAMPLES / "qwen3_moe/tiny_cpu.sh"], env=env, capture_output=True, text=True,
                          timeout=200, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr
    assert "dry run: 2 ranks on 1 nodes have found each other" in done.stdout


@pytest.mark.parametrize("text", ["n1", "n[1-3]", "n[2,5-7,16]", "a[01-03],login", "r[1-2]c[08-10]", "n[1-16]"])
def test_node_lists_as_slurm_reads_them(cluster: Cluster, text: str) -> None:
    assert expand_nodes(text) == cluster.slurm("scontrol", "show", "hostnames", text).split()
