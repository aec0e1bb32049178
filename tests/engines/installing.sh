# Of the scripts beside it, which source it: environments under .engines.
set -eu
root=$(cd "$(dirname "$0")/../.." && pwd)

# environment NAME VARIABLE: sets `env`; where the variable names another one, that is used, and nothing is installed
environment() {
  env=$root/.engines/$1
  [ -z "${!2:-}" ] || { echo "using ${!2}"; mkdir -p "$env"; exit 0; }
}

# has MODULES PACKAGE==VERSION...: whether these modules can be imported, and these releases are there
has() { # in a folder that has no ucformat of its own
  (cd / && "$env/bin/python" -c '
import importlib.metadata as m
import sys
for module in sys.argv[1].split():
    __import__(module)
for wanted in sys.argv[2:]:
    name, version = wanted.split("==")
    assert m.version(name) == version' "$@") 2>/dev/null
}

new_venv() {
  rm -rf "$env"
  "${PYTHON:-python3}" -m venv "$env"
}

pip_install() {
  "$env/bin/python" -m pip install --quiet --disable-pip-version-check "$@"
}

# beside_venv MODULES PACKAGE==VERSION...: these releases in a virtual environment that takes the rest from .venv
beside_venv() {
  ! has "$@" || return 0
  shift
  new_venv
  torch=$("$root/.venv/bin/python" -c 'import os, torch; print(os.path.dirname(os.path.dirname(torch.__file__)))')
  packages=$("$env/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  echo "import site; site.addsitedir('$torch')" > "$packages/of_tests.pth"
  pip_install --no-deps "$@" # dependencies could be other releases of what .venv has
}

# of_npm PACKAGE VERSION
of_npm() {
  ! grep -qs "\"version\": \"$2\"" "$env/node_modules/$1/package.json" || return 0
  mkdir -p "$env"
  echo '{"private": true}' > "$env/package.json"
  npm install --prefix "$env" --silent --no-audit --no-fund "$1@$2"
}
