#!/usr/bin/env bash
# Makes .engines/torchtitan, a virtual environment with the torchtitan that the tests run, on CPU; it takes PyTorch and
# what else .venv has from there. Does nothing where it is.
# UCFORMAT_TORCHTITAN_PYTHON, where set, names another interpreter that has it; then nothing is installed.
set -eu
root=$(cd "$(dirname "$0")/../.." && pwd)
env=$root/.engines/torchtitan
[ -z "${UCFORMAT_TORCHTITAN_PYTHON:-}" ] || { echo "using $UCFORMAT_TORCHTITAN_PYTHON"; mkdir -p "$env"; exit 0; }

has_torchtitan() {
  (cd / && "$env/bin/python" -c '
import importlib.metadata as m
import datasets, torch
assert (m.version("torchtitan"), m.version("datasets")) == ("0.3.0", "4.7.0")') 2>/dev/null
}

if ! has_torchtitan; then
  rm -rf "$env"
  "${PYTHON:-python3}" -m venv "$env"
  packages() { "$1" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }
  torch=$("$root/.venv/bin/python" -c 'import os, torch; print(os.path.dirname(os.path.dirname(torch.__file__)))')
  echo "import site; site.addsitedir('$torch')" > "$(packages "$env/bin/python")/of_tests.pth"
  # without dependencies: some of them would bring other releases of what .venv has, or Weights & Biases
  "$env/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps \
    torchtitan==0.3.0 torch_checkpointing==0.1.1 spmd_types==0.2.3 einops==0.8.2 \
    tyro==1.0.17 docstring_parser==0.18.0 typeguard==4.6.1 \
    datasets==4.7.0 pyarrow==26.0.1 dill==0.4.0 multiprocess==0.70.18 xxhash==4.1.0 httpx==0.28.1 httpcore==1.0.9 \
    tensorboard==2.21.0 tensorboard-data-server==0.7.2 protobuf==7.36.2 absl-py==2.5.1 grpcio==1.85.3 \
    Markdown==3.11.3 Werkzeug==3.1.9
fi
