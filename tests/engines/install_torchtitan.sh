#!/usr/bin/env bash
# Makes .engines/torchtitan, a virtual environment with the torchtitan that the tests run, on CPU; it takes PyTorch and
# what else .venv has from there. Does nothing where it is.
# UCFORMAT_TORCHTITAN_PYTHON, where set, names another interpreter that has it; then nothing is installed.
. "$(dirname "$0")/installing.sh"
environment torchtitan UCFORMAT_TORCHTITAN_PYTHON
# without Weights & Biases, which it would bring
beside_venv "datasets torch" \
  torchtitan==0.3.0 torch_checkpointing==0.1.1 spmd_types==0.2.3 einops==0.8.2 \
  tyro==1.0.17 docstring_parser==0.18.0 typeguard==4.6.1 \
  datasets==4.7.0 pyarrow==26.0.1 dill==0.4.0 multiprocess==0.70.18 xxhash==4.1.0 httpx==0.28.1 httpcore==1.0.9 \
  tensorboard==2.21.0 tensorboard-data-server==0.7.2 protobuf==7.36.2 absl-py==2.5.1 grpcio==1.85.3 \
  Markdown==3.11.3 Werkzeug==3.1.9
