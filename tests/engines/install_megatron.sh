#!/usr/bin/env bash
# Makes .engines/megatron, a virtual environment with the Megatron-Core and Megatron-FSDP that the tests run, on CPU; it
# takes PyTorch and what else .venv has from there. Does nothing where it is.
# UCFORMAT_MEGATRON_PYTHON, where set, names another interpreter that has it; then nothing is installed.
set -eu
root=$(cd "$(dirname "$0")/../.." && pwd)
env=$root/.engines/megatron
[ -z "${UCFORMAT_MEGATRON_PYTHON:-}" ] || { echo "using $UCFORMAT_MEGATRON_PYTHON"; mkdir -p "$env"; exit 0; }

has_megatron() {
  (cd / && "$env/bin/python" -c '
import importlib.metadata as m
import torch
wanted = {"megatron-core": "0.16.1", "megatron-fsdp": "0.6.1", "psutil": "7.2.2", "einops": "0.8.1"}
assert {name: m.version(name) for name in wanted} == wanted') 2>/dev/null
}

if ! has_megatron; then
  rm -rf "$env"
  "${PYTHON:-python3}" -m venv "$env"
  packages() { "$1" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }
  torch=$("$root/.venv/bin/python" -c 'import os, torch; print(os.path.dirname(os.path.dirname(torch.__file__)))')
  echo "import site; site.addsitedir('$torch')" > "$(packages "$env/bin/python")/of_tests.pth"
  # a wheel where there is one for this Python; its C++ extension is of no use here
  "$env/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps \
    megatron-core==0.16.1 megatron-fsdp==0.6.1 psutil==7.2.2 einops==0.8.1
fi
