#!/usr/bin/env bash
# Runs the first steps as a user would.
set -euo pipefail

python3 "$(dirname "$0")/count_steps.py" "$@"
