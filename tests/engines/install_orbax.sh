#!/usr/bin/env bash
# Makes .engines/orbax, a virtual environment with the Orbax and JAX that the tests run, on CPU. Does nothing where both are.
# UCFORMAT_ORBAX_PYTHON, where set, names another interpreter that has both; then nothing is installed.
. "$(dirname "$0")/installing.sh"
environment orbax UCFORMAT_ORBAX_PYTHON
has "" orbax-checkpoint==0.12.8 jax==0.10.2 optax==0.2.8 || {
  new_venv
  pip_install orbax-checkpoint==0.12.8 jax==0.10.2 jaxlib==0.10.2 optax==0.2.8
}
