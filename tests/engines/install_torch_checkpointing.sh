#!/usr/bin/env bash
# Makes .engines/torch_checkpointing, a virtual environment with the torch_checkpointing that the tests run; it takes
# PyTorch and what else .venv has from there. Does nothing where it is.
# UCFORMAT_TORCH_CHECKPOINTING_PYTHON, where set, names another interpreter that has it; then nothing is installed.
set -eu
root=$(cd "$(dirname "$0")/../.." && pwd)
env=$root/.engines/torch_checkpointing
[ -z "${UCFORMAT_TORCH_CHECKPOINTING_PYTHON:-}" ] || { echo "using $UCFORMAT_TORCH_CHECKPOINTING_PYTHON"; mkdir -p "$env"; exit 0; }

has_it() {
  (cd / && "$env/bin/python" -c '
import importlib.metadata as m
import torch
assert m.version("torch_checkpointing") == "0.1.1"') 2>/dev/null
}

if ! has_it; then
  rm -rf "$env"
  "${PYTHON:-python3}" -m venv "$env"
  packages() { "$1" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }
  torch=$("$root/.venv/bin/python" -c 'import os, torch; print(os.path.dirname(os.path.dirname(torch.__file__)))')
  echo "import site; site.addsitedir('$torch')" > "$(packages "$env/bin/python")/of_tests.pth"
  "$env/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps torch_checkpointing==0.1.1
fi
