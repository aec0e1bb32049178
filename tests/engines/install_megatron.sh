#!/usr/bin/env bash
# Makes .engines/megatron, a virtual environment with the Megatron-Core and Megatron-FSDP that the tests run, on CPU; it
# takes PyTorch and what else .venv has from there. Does nothing where it is.
# UCFORMAT_MEGATRON_PYTHON, where set, names another interpreter that has it; then nothing is installed.
. "$(dirname "$0")/installing.sh"
environment megatron UCFORMAT_MEGATRON_PYTHON
# a wheel where there is one for this Python; its C++ extension is of no use here
beside_venv torch megatron-core==0.16.1 megatron-fsdp==0.6.1 psutil==7.2.2 einops==0.8.1
