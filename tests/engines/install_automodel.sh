#!/usr/bin/env bash
# Makes .engines/automodel, a virtual environment with the NeMo AutoModel that the tests run, on CPU; it takes PyTorch,
# Transformers and what else .venv has from there. Does nothing where it is.
# UCFORMAT_AUTOMODEL_PYTHON, where set, names another interpreter that has it; then nothing is installed.
set -eu
root=$(cd "$(dirname "$0")/../.." && pwd)
env=$root/.engines/automodel
[ -z "${UCFORMAT_AUTOMODEL_PYTHON:-}" ] || { echo "using $UCFORMAT_AUTOMODEL_PYTHON"; mkdir -p "$env"; exit 0; }

has_automodel() {
  (cd / && "$env/bin/python" -c '
import importlib.metadata as m
import torch, transformers
assert m.version("nemo-automodel") == "0.7.0"') 2>/dev/null
}

if ! has_automodel; then
  rm -rf "$env"
  "${PYTHON:-python3}" -m venv "$env"
  packages() { "$1" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }
  torch=$("$root/.venv/bin/python" -c 'import os, torch; print(os.path.dirname(os.path.dirname(torch.__file__)))')
  echo "import site; site.addsitedir('$torch')" > "$(packages "$env/bin/python")/of_tests.pth"
  # without dependencies: its checkpointer needs what .venv has
  "$env/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps nemo-automodel==0.7.0
fi
