"""A small project on disk (model, tokenizer, prompts) and the `luspo` command run on it as a person would."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil

from tests.tiny import VOCAB, save_model

ROOT = Path(__file__).parents[2]
MARK = "E2E_MARK"  # environment variable that every process of one command inherits


def write_tokenizer(folder: Path) -> None:
    """One token per character for all ids below VOCAB: 0 <pad>, 1 <eos>, digits and signs, then other letters."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    characters = "0123456789+-=>< ." + "".join(map(chr, range(0x4E00, 0x4E00 + VOCAB)))
    vocabulary = {"<pad>": 0, "<eos>": 1, **{c: i + 2 for i, c in enumerate(characters[: VOCAB - 2])}}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>").save_pretrained(folder)


class Project:
    """`folder` with model/, prompts.jsonl (40), heldout.jsonl (6), demonstrations.jsonl (30)."""

    def __init__(self, folder: Path, kind: str = "moe") -> None:
        self.folder = folder
        self.model = save_model(folder / "model", kind, layers=2)
        write_tokenizer(self.model)
        # many ids end a response, so that the lengths of a random policy's responses differ
        path = self.model / "generation_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token_id": [1, *range(20, VOCAB, 10)]}))
        rows = [{"prompt": f"{i}+{i % 7}=", "answer": str(i + i % 7)} for i in range(46)]
        self.prompts = self._write("prompts.jsonl", rows[:40])
        self.heldout = self._write("heldout.jsonl", rows[40:])
        self.demonstrations = self._write("demonstrations.jsonl", [
            {"prompt": row["prompt"], "response": row["answer"] + "." * (i % 5)} for i, row in enumerate(rows[:30])])

    def _write(self, name: str, rows: list[dict[str, Any]]) -> Path:
        path = self.folder / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return path

    def train(self, run_dir: Path, *flags: str) -> list[str]:
        """Arguments of a short `luspo train`: 2 updates per step, no evaluation."""
        return ["train", "--run.dir", str(run_dir), "--run.steps", "6", "--run.sample_table_every", "1",
                "--run.tensorboard", "false", "--model.hf", str(self.model), "--data.prompts", str(self.prompts),
                "--rollout.prompts_per_step", "4", "--rollout.group_size", "4", "--rollout.max_response_tokens", "12",
                "--reward.terms", "tests.e2e.rewards:parity:1.0", "--algorithm.prompts_per_mini_batch", "2",
                "--optimizer.lr", "1e-3", "--optimizer.warmup_steps", "4", "--data.max_prompt_tokens", "16",
                "--batch.max_tokens_per_micro_batch", "64", "--weight_sync.bucket_bytes", "20000", *flags]

    def sft(self, run_dir: Path, *flags: str) -> list[str]:
        """Arguments of a short `luspo sft`."""
        return ["sft", "--run.dir", str(run_dir), "--run.steps", "6", "--run.tensorboard", "false", "--model.hf",
                str(self.model), "--data.path", str(self.demonstrations), "--data.max_tokens", "32", "--batch_size",
                "8", "--batch.max_tokens_per_micro_batch", "64", "--optimizer.lr", "3e-3", "--optimizer.warmup_steps",
                "0", *flags]

    def eval(self, out: Path, *flags: str) -> list[str]:
        """Arguments of a small `luspo eval`."""
        return ["eval", "--out", str(out), "--data.eval_prompts", str(self.heldout), "--eval.samples", "2",
                "--rollout.max_response_tokens", "12", "--data.max_prompt_tokens", "16", "--reward.terms",
                "tests.e2e.rewards:parity:1.0", *flags]


LAYOUTS = {
    "1": [],
    "tp2ep2": ["--parallel.world_size", "2", "--parallel.tp", "2", "--parallel.ep", "2"],
    "pp2": ["--parallel.world_size", "2", "--parallel.pp", "2"],
}


class Command:
    """One `luspo` process with its output in files; `code` once it has ended."""

    def __init__(self, arguments: list[str], scratch: Path, **environment: str) -> None:
        self.mark = uuid.uuid4().hex
        self.scratch = scratch
        scratch.mkdir(parents=True, exist_ok=True)
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), MARK: self.mark, **environment}
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
            env.pop(name, None)
        with (scratch / "stdout").open("wb") as out, (scratch / "stderr").open("wb") as err:
            self.process = subprocess.Popen([sys.executable, "-m", "luspo_megatron", *arguments], stdout=out,
                                            stderr=err, stdin=subprocess.DEVNULL, env=env, cwd=ROOT,
                                            start_new_session=True)

    @property
    def stdout(self) -> str:
        return (self.scratch / "stdout").read_text()

    @property
    def stderr(self) -> str:
        return (self.scratch / "stderr").read_text()

    @property
    def said(self) -> str:
        return f"{self.stdout}\n--- stderr:\n{self.stderr}"

    def wait(self, timeout: float = 900) -> int:
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.end()
            raise AssertionError(f"the command did not end in {timeout} s:\n{self.said}") from None

    def until(self, condition: Callable[[], Any], timeout: float = 600) -> Any:
        """Poll until `condition` gives something true; fails when the command ends first."""
        end = time.monotonic() + timeout
        while not (found := condition()):
            if self.process.poll() is not None:
                raise AssertionError(f"the command ended with {self.process.returncode} first:\n{self.said}")
            if time.monotonic() > end:
                self.end()
                raise AssertionError(f"not within {timeout} s:\n{self.said}")
            time.sleep(0.01)
        return found

    def processes(self) -> list[psutil.Process]:
        """Every living process of the command, whatever its group or parent."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get(MARK) == self.mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def of(self, module: str) -> list[psutil.Process]:
        """Its processes that run a module of the package; forked helpers (the reward workers' server) not counted."""
        found = []
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                line = process.cmdline()
                if any(module in word for word in line) and "multiprocessing" not in " ".join(line):
                    found.append(process)
        return found

    def assert_nothing_left(self, grace: float = 10) -> None:
        end = time.monotonic() + grace
        while left := self.processes():
            if time.monotonic() > end:
                lines = [f"{p.pid}: {' '.join(p.cmdline())[:200]}" for p in left]
                self.end()
                raise AssertionError("processes left behind:\n" + "\n".join(lines))
            time.sleep(0.1)

    def end(self) -> None:
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                process.kill()


@contextlib.contextmanager
def command(arguments: list[str], scratch: Path, **environment: str) -> Iterator[Command]:
    started = Command(arguments, scratch, **environment)
    try:
        yield started
    finally:
        started.end()
        started.process.wait()


def luspo(arguments: list[str], scratch: Path, code: int = 0, **environment: str) -> Command:
    """Run to the end; it must exit with `code` and leave no process."""
    with command(arguments, scratch, **environment) as run:
        assert run.wait() == code, run.said
        run.assert_nothing_left()
    return run


def rows(run_dir: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    path = run_dir / name
    lines = path.read_text().splitlines() if path.exists() else []
    out = []
    for line in lines:
        with contextlib.suppress(ValueError):  # being written
            out.append(json.loads(line))
    return out


def untimed(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of metrics.jsonl without what a clock says."""
    return [{key: value for key, value in record.items() if not key.startswith("seconds/") and
             key != "tokens_per_second"} for record in records]


def contents(folder: Path, *, without: tuple[str, ...] = ("logs",)) -> dict[str, str]:
    """Digest of every file below `folder`."""
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in sorted(folder.rglob("*"))
            if path.is_file() and path.relative_to(folder).parts[0] not in without}


def tensors(folder: Path) -> dict[str, Any]:
    from safetensors.numpy import load_file

    return {name: value for path in folder.glob("*.safetensors") for name, value in load_file(path).items()}
