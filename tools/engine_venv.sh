#!/usr/bin/env bash
# Make a virtual environment with a rollout engine for this machine's CPU, from the pins in requirements/.
#
#   tools/engine_venv.sh vllm|sglang FOLDER
#
# The engines' pins clash with each other's and with ours, and their CPU wheels are for Python 3.11, so each has an
# environment of its own; a run is told of it by rollout.engine_python=FOLDER/bin/python. A second call is instant: the
# folder is made anew only when its pins have changed. ENGINE_PYTHON: the Python 3.11 to use, otherwise one is looked for
# (PATH, pyenv, uv). TORCH_INDEX_URL: package index with a CPU build of torch (4 GB less than the default build).
set -euo pipefail
cd "$(dirname "$0")/.."

if [[ $# != 2 || ! -f "requirements/${1:-}-cpu.txt" ]]; then
    echo "usage: tools/engine_venv.sh vllm|sglang FOLDER" >&2
    exit 2
fi
engine="$1" folder="$2" pins="requirements/$1-cpu.txt"
stamp="$folder/.pins-$(cksum <"$pins" | cut -d' ' -f1)"
if [[ -e "$stamp" ]]; then exit 0; fi
if [[ -e "$folder" && ! -f "$folder/pyvenv.cfg" ]]; then
    echo "tools/engine_venv.sh: $folder exists and is no virtual environment; name another folder" >&2
    exit 2
fi

good() { # good COMMAND: prints the interpreter's own path when it is a Python 3.11 that can make environments
    "$1" -c 'import sys
if sys.version_info[:2] != (3, 11): sys.exit(1)
import ensurepip, venv
print(sys.executable)' 2>/dev/null
}

find_python() {
    if [[ -n "${ENGINE_PYTHON:-}" ]]; then
        good "$ENGINE_PYTHON" && return
        echo "tools/engine_venv.sh: ENGINE_PYTHON=$ENGINE_PYTHON is no Python 3.11 with its venv module" >&2
        return 2
    fi
    local candidate root
    root="$(pyenv root 2>/dev/null || echo "${PYENV_ROOT:-$HOME/.pyenv}")"
    for candidate in python3.11 "$root"/versions/3.11*/bin/python python3; do good "$candidate" && return; done
    candidate="$(UV_PYTHON_DOWNLOADS=never uv python find 3.11 2>/dev/null)" && good "$candidate" && return
    echo "tools/engine_venv.sh: no Python 3.11 with its venv module, which the engines' CPU wheels need: run 'uv python" \
        "install 3.11' or 'pyenv install 3.11' or install python3.11-venv, or give ENGINE_PYTHON=/path/to/python3.11" >&2
    return 2
}

python="$(find_python)"
echo "Making $folder with $engine and $python (3.5 GB; output goes to $folder.log)"
mkdir -p "$(dirname "$folder")"
install() {
    "$python" -m venv --clear "$folder"
    if [[ -n "${TORCH_INDEX_URL:-}" ]]; then
        "$folder/bin/pip" install --quiet --no-deps --index-url "$TORCH_INDEX_URL" "$(grep -m1 '^torch==' "$pins")"
    fi
    "$folder/bin/pip" install --quiet --no-deps -r "$pins"
}
export PIP_DISABLE_PIP_VERSION_CHECK=1
if ! (install) >"$folder.log" 2>&1; then
    echo "tools/engine_venv.sh: the installation failed; the end of $folder.log:" >&2
    tail -n 15 "$folder.log" >&2
    exit 1
fi
touch "$stamp"
