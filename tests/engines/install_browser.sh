#!/usr/bin/env bash
# Makes .engines/browser, with axe-core (npm), and puts Playwright into .venv: tests walk the pages with them in
# Debian's Chromium. Needs npm and the browser: apt-get install npm chromium. Does nothing where it is.
# UCFORMAT_AXE, where set, names another folder whose node_modules has axe-core; then nothing is installed.
. "$(dirname "$0")/installing.sh"
environment browser UCFORMAT_AXE
"$root/.venv/bin/python" -c "import playwright" 2>/dev/null ||
  "$root/.venv/bin/pip" install --quiet --disable-pip-version-check -c "$root/constraints.txt" playwright
of_npm axe-core 4.14.1
