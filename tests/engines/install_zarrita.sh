#!/usr/bin/env bash
# Makes .engines/zarrita, with the zarrita (npm) by which the tests read arrays from a server; needs node and npm:
# apt-get install nodejs npm. Does nothing where it is.
# UCFORMAT_ZARRITA, where set, names another folder whose node_modules has it; then nothing is installed.
set -eu
root=$(cd "$(dirname "$0")/../.." && pwd)
env=$root/.engines/zarrita
[ -z "${UCFORMAT_ZARRITA:-}" ] || { echo "using $UCFORMAT_ZARRITA"; mkdir -p "$env"; exit 0; }
version=0.7.5

if ! grep -qs "\"version\": \"$version\"" "$env/node_modules/zarrita/package.json"; then
  mkdir -p "$env"
  echo '{"private": true}' > "$env/package.json"
  npm install --prefix "$env" --silent --no-audit --no-fund "zarrita@$version"
fi
