#!/usr/bin/env bash
# Makes .engines/deepspeed, a virtual environment with the DeepSpeed that the tests run, on CPU. Does nothing where it is.
# UCFORMAT_DEEPSPEED_PYTHON, where set, names another interpreter that has DeepSpeed; then nothing is installed.
set -eu
root=$(cd "$(dirname "$0")/../.." && pwd)
env=$root/.engines/deepspeed
[ -z "${UCFORMAT_DEEPSPEED_PYTHON:-}" ] || { echo "using $UCFORMAT_DEEPSPEED_PYTHON"; mkdir -p "$env"; exit 0; }
if [ -x "$env/bin/python" ] && "$env/bin/python" -c 'import importlib.metadata as m; assert m.version("deepspeed") == "0.19.8"' 2>/dev/null; then
  exit 0
fi
rm -rf "$env"
"${PYTHON:-python3}" -m venv "$env"
pip=("$env/bin/python" -m pip install --quiet --disable-pip-version-check)
"${pip[@]}" torch==2.13.0
"${pip[@]}" numpy safetensors "setuptools<80" wheel ninja
# without build isolation: the build looks at the installed torch, and would otherwise fetch another one
PATH="$env/bin:$PATH" DS_BUILD_OPS=0 DS_ACCELERATOR=cpu "${pip[@]}" --no-build-isolation deepspeed==0.19.8
