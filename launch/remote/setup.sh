# shellcheck shell=bash
# `. setup.sh LINE...`: run the lines that a site's file wants in front of everything; where one fails, the shell that
# asks for it ends.

lines=("$@")
set -- # what a line sources gets no arguments of this file
for line in "${lines[@]}"; do
  eval "$line" && continue
  echo "error: $line failed on $(hostname)" >&2
  exit 1
done
