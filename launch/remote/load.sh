# shellcheck shell=bash
# `. load.sh MODULE...`: load environment modules; where one does not load, the shell that asks for it ends.

for module in "$@"; do
  module load "$module" && continue
  echo "error: module load $module failed on $(hostname)" >&2
  exit 1
done
