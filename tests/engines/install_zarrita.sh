#!/usr/bin/env bash
# Makes .engines/zarrita, with the zarrita (npm) by which the tests read arrays from a server; needs node and npm:
# apt-get install nodejs npm. Does nothing where it is.
# UCFORMAT_ZARRITA, where set, names another folder whose node_modules has it; then nothing is installed.
. "$(dirname "$0")/installing.sh"
environment zarrita UCFORMAT_ZARRITA
of_npm zarrita 0.7.5
