set -euo pipefail
if true; then
