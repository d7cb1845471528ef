# shellcheck shell=bash
# What was measured, and the last lines of every log.
#
# absent         there is nothing
# output FILE    what it holds

declare directory logs log_lines
declare gpu      # how the files of GPUs begin
declare -a files # those of the links and nodes

cd "$directory" || { part absent true; exit; }
for file in "${files[@]}" "$gpu"*.json; do
  [ ! -s "$file" ] || part "output $file" cat "$file"
done
for file in "$logs"/*.log; do
  [ ! -s "$file" ] || part "output $file" tail -n "$log_lines" "$file"
done
exit 0
