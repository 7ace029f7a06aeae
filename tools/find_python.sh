#!/bin/sh
# Print the path of a Python >= 3.12 that can make virtual environments; otherwise say in one line what is missing.
# Looks at $PYTHON (then nothing else), PATH, pyenv's versions and uv's. 3.12 comes first: the pins were tested with it.

good() {  # good COMMAND: prints the interpreter's own path when it will do
    "$1" -c 'import sys
if sys.version_info < (3, 12): sys.exit(1)
import ensurepip, venv
print(sys.executable)' 2>/dev/null
}

version() {  # version COMMAND: "Python 3.11.2", or nothing
    "$1" -c 'import sys; print("Python %d.%d.%d" % sys.version_info[:3])' 2>/dev/null
}

if [ -n "$PYTHON" ]; then
    good "$PYTHON" && exit 0
    found=$(version "$PYTHON")
    echo "PYTHON=$PYTHON is ${found:-no Python}; luspo needs Python >= 3.12 with its venv module" >&2
    exit 1
fi

seen=""
consider() {
    found=$(version "$1") || return 0
    if good "$1"; then exit 0; fi
    seen="$seen${seen:+, }$1 ($found)"
}

for name in python3.12 python3.13 python3.14 python3; do
    if command -v "$name" >/dev/null 2>&1; then consider "$name"; fi
done

if command -v pyenv >/dev/null 2>&1; then root=$(pyenv root 2>/dev/null); else root=${PYENV_ROOT:-$HOME/.pyenv}; fi
for python in "$root"/versions/3.12*/bin/python "$root"/versions/3.1[3-9]*/bin/python; do
    if [ -x "$python" ]; then consider "$python"; fi
done

if command -v uv >/dev/null 2>&1; then
    python=$(UV_PYTHON_DOWNLOADS=never uv python find '>=3.12' 2>/dev/null)
    if [ -n "$python" ]; then consider "$python"; fi
fi

echo "No Python >= 3.12 with its venv module (found: ${seen:-none}): run 'uv python install 3.12' or" \
    "'pyenv install 3.12' or install python3.12-venv, or give PYTHON=/path/to/python" >&2
exit 1
