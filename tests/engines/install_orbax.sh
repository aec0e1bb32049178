#!/usr/bin/env bash
# Makes .engines/orbax, a virtual environment with the Orbax and JAX that the tests run, on CPU. Does nothing where both are.
# UCFORMAT_ORBAX_PYTHON, where set, names another interpreter that has both; then nothing is installed.
set -eu
root=$(cd "$(dirname "$0")/../.." && pwd)
env=$root/.engines/orbax
[ -z "${UCFORMAT_ORBAX_PYTHON:-}" ] || { echo "using $UCFORMAT_ORBAX_PYTHON"; mkdir -p "$env"; exit 0; }

has_orbax() {
  (cd / && "$env/bin/python" -c '
import importlib.metadata as m
assert (m.version("orbax-checkpoint"), m.version("jax"), m.version("optax")) == ("0.12.8", "0.10.2", "0.2.8")') 2>/dev/null
}

if ! has_orbax; then
  rm -rf "$env"
  "${PYTHON:-python3}" -m venv "$env"
  "$env/bin/python" -m pip install --quiet --disable-pip-version-check \
    orbax-checkpoint==0.12.8 jax==0.10.2 jaxlib==0.10.2 optax==0.2.8
fi
