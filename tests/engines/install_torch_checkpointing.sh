#!/usr/bin/env bash
# Makes .engines/torch_checkpointing, a virtual environment with the torch_checkpointing that the tests run; it takes
# PyTorch and what else .venv has from there. Does nothing where it is.
# UCFORMAT_TORCH_CHECKPOINTING_PYTHON, where set, names another interpreter that has it; then nothing is installed.
. "$(dirname "$0")/installing.sh"
environment torch_checkpointing UCFORMAT_TORCH_CHECKPOINTING_PYTHON
beside_venv torch torch_checkpointing==0.1.1
