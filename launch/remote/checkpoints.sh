# shellcheck shell=bash
# List the files of the checkpoints that runs have at a site.
#
# files DIRECTORY           a line `BYTES SECONDS PATH` for each file of a run's directory, SECONDS since the epoch
# complete DIRECTORY/PATH   what a checkpoint says that it has

declare -a directories

for directory in "${directories[@]}"; do
  cd "$directory" 2>/dev/null || continue
  [ -d checkpoints ] || continue
  part "files $directory" find checkpoints -type f -printf '%s %T@ %p\n'
  for path in checkpoints/step-*/COMPLETE checkpoints/*/step-*/COMPLETE; do
    if [ -f "$path" ]; then part "complete $directory/$path" cat "$path"; fi
  done
done
exit 0
