#!/usr/bin/env bash
set -euo pipefail
rm $1
