"""The luspo command: what it dispatches to, its exit codes and messages."""

from __future__ import annotations

import subprocess
import sys
import types

import pytest

from luspo_megatron import __version__, cli
from luspo_megatron.config import Config, ExportConfig, SftConfig
from luspo_megatron.errors import RunError, UserError


@pytest.fixture
def worker(monkeypatch):
    """Put a module in the place of the one that does the work; gives the configurations it was called with."""
    calls: list[object] = []

    def install(name: str, result: object = None, error: BaseException | None = None) -> list[object]:
        def main(config: object) -> object:
            calls.append(config)
            if error is not None:
                raise error
            return result

        module = types.ModuleType(name)
        module.main = main  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, name, module)
        return calls

    return install


@pytest.fixture
def export_flags(tmp_path):
    return ["export", "--checkpoint", str(tmp_path), "--out", str(tmp_path / "out")]


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "luspo_megatron", *words], capture_output=True, text=True, timeout=60)


def test_help_version_and_no_command(capsys):
    assert cli.main(["--help"]) == 0
    shown = capsys.readouterr()
    assert all(f"\n  {name}" in shown.out for name in ("train", "sft", "eval", "export")) and not shown.err
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"luspo {__version__}\n"
    assert cli.main([]) == 2
    shown = capsys.readouterr()
    assert not shown.out and "usage: luspo" in shown.err


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_help_of_each_command(command, capsys):
    assert cli.main([command, "--help"]) == 0
    shown = capsys.readouterr()
    assert f"usage: luspo {command}" in shown.out and not shown.err


def test_an_unknown_command(capsys):
    assert cli.main(["trian"]) == 2
    assert "unknown command 'trian'; did you mean train?" in capsys.readouterr().err


def test_dispatch_gives_the_checked_configuration(worker, tmp_path, export_flags):
    calls = worker("luspo_megatron.export")
    assert cli.main(export_flags) == 0
    assert calls == [ExportConfig(checkpoint=str(tmp_path), out=str(tmp_path / "out"))]


def test_train_is_dispatched_and_warns(worker, tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("SLURM_PROCID", raising=False)
    (tmp_path / "config.json").write_text(
        '{"architectures": ["Qwen3ForCausalLM"], "num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 8, '
        '"intermediate_size": 8, "vocab_size": 9, "rms_norm_eps": 1e-6, "rope_theta": 1e4, '
        '"max_position_embeddings": 4096}'
    )
    calls = worker("luspo_megatron.trainer", result=3)
    flags = ["train", "--model.hf", str(tmp_path), "--data.prompts", "reasoning_gym:chain_sum"]
    assert cli.main([*flags, "--algorithm.clip_low", "0.2"]) == 3
    assert isinstance(calls[0], Config) and calls[0].algorithm.clip_low == 0.2
    assert capsys.readouterr().err.startswith("luspo: warning: clip_low 0.2")
    monkeypatch.setenv("RANK", "1")
    assert cli.main([*flags, "--algorithm.clip_low", "0.2"]) == 3 and not capsys.readouterr().err


def test_a_bad_configuration_never_reaches_the_work(worker, capsys):
    calls = worker("luspo_megatron.sft")
    assert cli.main(["sft", "--optimizer.lr", "0"]) == 2
    shown = capsys.readouterr().err
    assert calls == [] and shown.startswith("luspo: 3 settings need mending:") and "--optimizer.lr 0.0" in shown
    assert isinstance(SftConfig(), SftConfig)


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (UserError("no column q"), 2, "luspo: no column q\n"),
        (RunError("engine 0 is gone"), 1, "luspo: engine 0 is gone\n"),
        (KeyboardInterrupt(), 130, "luspo: interrupted\n"),
    ],
)
def test_errors_end_with_one_message(worker, capsys, export_flags, error, code, text):
    worker("luspo_megatron.export", error=error)
    assert cli.main(export_flags) == code
    assert capsys.readouterr().err == text


def test_a_fault_of_the_program_keeps_its_traceback(worker, export_flags):
    worker("luspo_megatron.export", error=ZeroDivisionError())
    with pytest.raises(ZeroDivisionError):
        cli.main(export_flags)


def test_system_exit_of_the_work_is_the_exit_code(worker, export_flags):
    worker("luspo_megatron.export", error=SystemExit(4))
    assert cli.main(export_flags) == 4


def test_a_real_process_shows_one_message_and_no_traceback(tmp_path):
    bad = tmp_path / "bad.yaml"
    bad.write_text("optimizer: {lrr: 1}\n")
    done = run("train", "--config", str(bad))
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr == f"luspo: {bad}: unknown key optimizer.lrr; did you mean optimizer.lr?\n"


def test_a_reader_that_goes_away_is_no_error():
    command = f"set -o pipefail; {sys.executable} -m luspo_megatron train --help | head -1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    assert "Traceback" not in done.stderr and done.stdout.startswith("usage: luspo train")
