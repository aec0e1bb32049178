#!/usr/bin/env bash
# Makes .engines/browser, with axe-core (npm), and puts Playwright into .venv: tests walk the pages with them in
# Debian's Chromium. Needs npm and the browser: apt-get install npm chromium. Does nothing where it is.
# UCFORMAT_AXE, where set, names another folder whose node_modules has axe-core; then nothing is installed.
set -eu
root=$(cd "$(dirname "$0")/../.." && pwd)
env=$root/.engines/browser
[ -z "${UCFORMAT_AXE:-}" ] || { echo "using $UCFORMAT_AXE"; mkdir -p "$env"; exit 0; }
version=4.14.1

"$root/.venv/bin/python" -c "import playwright" 2>/dev/null ||
  "$root/.venv/bin/pip" install --quiet --disable-pip-version-check -c "$root/constraints.txt" playwright
if ! grep -qs "\"version\": \"$version\"" "$env/node_modules/axe-core/package.json"; then
  mkdir -p "$env"
  echo '{"private": true}' > "$env/package.json"
  npm install --prefix "$env" --silent --no-audit --no-fund "axe-core@$version"
fi
