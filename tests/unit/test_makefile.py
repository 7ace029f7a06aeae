"""The Makefile and the search for a Python, with stand-ins for the interpreters."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
FINDER = REPOSITORY / "tools/find_python.sh"
needs_make = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


def fake_python(path: Path, version: str, venv: bool = True) -> str:
    """A command that answers the finder's two questions like a Python of that version."""
    path.parent.mkdir(parents=True, exist_ok=True)
    good = tuple(map(int, version.split(".")[:2])) >= (3, 12) and venv
    path.write_text(
        "#!/bin/sh\n"
        f'case "$2" in *ensurepip*) {"echo " + str(path) if good else "exit 1"};; *) echo "Python {version}";; esac\n'
    )
    path.chmod(0o755)
    return str(path)


def find(folder: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Run the finder with a PATH that holds only ``folder``/bin and no home."""
    (folder / "bin").mkdir(exist_ok=True)
    base = {"PATH": str(folder / "bin"), "HOME": str(folder / "home")}
    return subprocess.run(["/bin/sh", str(FINDER)], env=base | env, capture_output=True, text=True, timeout=30)


def test_the_running_python_is_good_enough():
    done = subprocess.run([str(FINDER)], env=os.environ | {"PYTHON": sys.executable}, capture_output=True, text=True)
    assert done.returncode == 0 and Path(done.stdout.strip()).exists() and not done.stderr


def test_path_is_searched_and_3_12_comes_first(tmp_path):
    fake_python(tmp_path / "bin/python3", "3.11.2")
    newer = fake_python(tmp_path / "bin/python3.13", "3.13.0")
    assert find(tmp_path).stdout.strip() == newer
    tested = fake_python(tmp_path / "bin/python3.12", "3.12.1")
    assert find(tmp_path).stdout.strip() == tested


def test_a_plain_python3_that_is_new_enough(tmp_path):
    only = fake_python(tmp_path / "bin/python3", "3.14.1")
    assert find(tmp_path).stdout.strip() == only


def test_a_python_without_venv_is_passed_over(tmp_path):
    fake_python(tmp_path / "bin/python3.12", "3.12.3", venv=False)
    other = fake_python(tmp_path / "bin/python3.13", "3.13.0")
    assert find(tmp_path).stdout.strip() == other


def test_a_shim_that_fails_is_passed_over_for_pyenv_s_versions(tmp_path):
    shim = tmp_path / "bin/python3.12"
    shim.parent.mkdir()
    shim.write_text("#!/bin/sh\necho 'pyenv: python3.12: command not found' >&2\nexit 127\n")
    shim.chmod(0o755)
    fake_python(tmp_path / "pyenv/versions/3.11.7/bin/python", "3.11.7")
    real = fake_python(tmp_path / "pyenv/versions/3.12.1/bin/python", "3.12.1")
    pyenv = tmp_path / "bin/pyenv"
    pyenv.write_text(f'#!/bin/sh\n[ "$1" = root ] && echo {tmp_path}/pyenv\n')
    pyenv.chmod(0o755)
    assert find(tmp_path).stdout.strip() == real
    pyenv.unlink()
    assert find(tmp_path, PYENV_ROOT=str(tmp_path / "pyenv")).stdout.strip() == real


def test_uv_s_pythons(tmp_path):
    python = fake_python(tmp_path / "uv/python", "3.12.9")
    uv = tmp_path / "bin/uv"
    uv.parent.mkdir()
    uv.write_text(f'#!/bin/sh\n[ "$1 $2" = "python find" ] && echo {python}\n')
    uv.chmod(0o755)
    assert find(tmp_path).stdout.strip() == python


def test_nothing_found_is_one_line(tmp_path):
    done = find(tmp_path)
    assert done.returncode == 1 and done.stdout == "" and done.stderr.count("\n") == 1 and "found: none" in done.stderr
    old = fake_python(tmp_path / "bin/python3", "3.11.2")
    done = find(tmp_path)
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert "(found: python3 (Python 3.11.2))" in done.stderr and "PYTHON=" in done.stderr and old


def test_python_overrides_and_is_not_replaced(tmp_path):
    fake_python(tmp_path / "bin/python3.12", "3.12.1")
    mine = fake_python(tmp_path / "mine/python", "3.13.2")
    assert find(tmp_path, PYTHON=mine).stdout.strip() == mine
    old = fake_python(tmp_path / "old/python", "3.11.2")
    for bad, what in ((old, "Python 3.11.2"), (str(tmp_path / "none"), "no Python")):
        done = find(tmp_path, PYTHON=bad)
        assert done.returncode == 1 and done.stdout == "" and f"PYTHON={bad} is {what}" in done.stderr


# --- the Makefile ---------------------------------------------------------------------------------------------------


@pytest.fixture
def project(tmp_path) -> Path:
    """The files that the Makefile looks at, in a folder of their own."""
    shutil.copytree(REPOSITORY / "tools", tmp_path / "tools")
    for name in ("Makefile", "constraints.txt", "setup.py"):
        shutil.copy(REPOSITORY / name, tmp_path / name)
    return tmp_path


def make(project: Path, *words: str) -> subprocess.CompletedProcess[str]:
    env = {key: value for key, value in os.environ.items() if not key.startswith(("MAKE", "PYTHON"))}
    return subprocess.run(["make", *words], cwd=project, env=env, capture_output=True, text=True, timeout=60)


@needs_make
def test_help_is_the_default_and_lists_every_target(project):
    done = make(project)
    targets = re.findall(r"^\.PHONY: (\S+)$", (project / "Makefile").read_text(), flags=re.MULTILINE)
    assert done.returncode == 0 and len(targets) >= 6
    assert all(re.search(rf"^  {target} +\S", done.stdout, flags=re.MULTILINE) for target in targets)


def setup_stamp(project: Path) -> Path:
    """Let make name its stamp: the file that `make -n setup` would touch."""
    return project / re.search(r"touch (\S+)", make(project, "-n", "setup").stdout)[1]


@needs_make
def test_the_environment_is_kept_until_pins_or_ranges_change(project):
    stamp = setup_stamp(project)
    stamp.parent.mkdir()
    stamp.touch()
    os.utime(project / "constraints.txt")  # newer, but of the same content: a fresh checkout
    assert "venv" not in make(project, "-n", "setup").stdout
    for name in ("constraints.txt", "setup.py"):
        text = (project / name).read_text()
        (project / name).write_text(text + "# changed\n")
        assert "-m venv --clear .venv" in make(project, "-n", "setup").stdout
        (project / name).write_text(text)
    assert "venv" not in make(project, "-n", "setup").stdout


@needs_make
def test_another_build_of_torch(project):
    plan = make(project, "-n", "setup", "TORCH_INDEX_URL=file:///torch").stdout
    assert re.search(r"--no-deps --index-url 'file:///torch' 'torch==[0-9.]+'", plan)


@needs_make
def test_targets_set_up_first_and_run_what_they_say(project):
    for target, command in (
        ("test", "-m pytest tests"),
        ("lint", "mypy luspo_megatron"),
        ("demo", "examples/qwen3_moe/tiny_cpu.sh"),
    ):
        plan = make(project, "-n", target).stdout
        assert plan.index("-m venv") < plan.index("pip install") < plan.index(command)


@needs_make
def test_a_bad_python_stops_before_anything_is_made(project):
    done = make(project, "setup", "PYTHON=/no/such/python")
    assert done.returncode != 0 and "PYTHON=/no/such/python is no Python" in done.stderr
    assert not (project / ".venv").exists()


def test_pins_are_exact_and_name_no_place():
    lines = [line for line in (REPOSITORY / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"[a-z0-9.-]+==[A-Za-z0-9.]+", line) for line in lines)
    names = {line.partition("==")[0] for line in lines}
    asked = re.findall(r'^ +"([a-z][a-zA-Z-]+)[^"]*",$', (REPOSITORY / "setup.py").read_text(), flags=re.MULTILINE)
    assert len(asked) > 15 and {name.lower() for name in asked} <= names


def test_the_ci_script_is_sound():
    done = subprocess.run(["bash", "-n", str(REPOSITORY / ".ci/run")], capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr
