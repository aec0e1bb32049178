#!/usr/bin/env bash
# Makes .engines/deepspeed, a virtual environment with the DeepSpeed that the tests run, on CPU, and ucformat itself with
# its core requirements (editable). Does nothing where both are.
# UCFORMAT_DEEPSPEED_PYTHON, where set, names another interpreter that has both; then nothing is installed.
. "$(dirname "$0")/installing.sh"
environment deepspeed UCFORMAT_DEEPSPEED_PYTHON

has_deepspeed() { has "" deepspeed==0.19.8; }
# in a folder that has no ucformat of its own
has_ucformat() {
  (cd / && ROOT=$root "$env/bin/python" - 2>/dev/null) <<'PYTHON'
import importlib.metadata as m
import os
import re
import tomllib

import ucformat

root = os.environ["ROOT"]
assert os.path.samefile(os.path.dirname(ucformat.__file__), os.path.join(root, "ucformat"))
same = lambda name: re.sub("[-_.]+", "-", name).lower()
with open(os.path.join(root, "constraints.txt")) as file:
    pinned = {same(line.split("==")[0]): line.strip().split("==")[1] for line in file if "==" in line}
with open(os.path.join(root, "pyproject.toml"), "rb") as file:
    needed = tomllib.load(file)["project"]["dependencies"]
for name in (re.match(r"[\w.-]+", need)[0] for need in needed):
    assert m.version(name) == pinned[same(name)], name
PYTHON
}

if [ ! -x "$env/bin/python" ] || ! has_deepspeed; then
  new_venv
fi
if ! has_deepspeed; then
  pip_install torch==2.13.0
  pip_install numpy safetensors "setuptools<80" wheel ninja
  # without build isolation: the build looks at the installed torch, and would otherwise fetch another one
  PATH="$env/bin:$PATH" DS_BUILD_OPS=0 DS_ACCELERATOR=cpu pip_install --no-build-isolation deepspeed==0.19.8
fi
if ! has_ucformat; then
  pip_install -c "$root/constraints.txt" -e "$root"
fi
