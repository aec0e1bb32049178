#!/usr/bin/env bash
# Makes .engines/automodel, a virtual environment with the NeMo AutoModel that the tests run, on CPU; it takes PyTorch,
# Transformers and what else .venv has from there. Does nothing where it is.
# UCFORMAT_AUTOMODEL_PYTHON, where set, names another interpreter that has it; then nothing is installed.
. "$(dirname "$0")/installing.sh"
environment automodel UCFORMAT_AUTOMODEL_PYTHON
# its checkpointer needs nothing that .venv lacks
beside_venv "torch transformers" nemo-automodel==0.7.0
