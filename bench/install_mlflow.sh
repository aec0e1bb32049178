#!/usr/bin/env bash
# Makes .engines/mlflow, a virtual environment with the MLflow that bench/catalog.py compares with. Does nothing where it is.
# The skinny package and what its SQL store imports: the same code as the full one, without what it does not need.
# UCFORMAT_MLFLOW_PYTHON, where set, names another interpreter that has MLflow; then nothing is installed.
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
env=$root/.engines/mlflow
[ -z "${UCFORMAT_MLFLOW_PYTHON:-}" ] || { echo "using $UCFORMAT_MLFLOW_PYTHON"; exit 0; }
if [ -x "$env/bin/python" ] && "$env/bin/python" -c 'import importlib.metadata as m; assert m.version("mlflow-skinny") == "3.17.2"' 2>/dev/null; then
  exit 0
fi
rm -rf "$env"
"${PYTHON:-python3}" -m venv "$env"
"$env/bin/python" -m pip install --quiet --disable-pip-version-check mlflow-skinny==3.17.2 sqlalchemy alembic
