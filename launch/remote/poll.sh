# shellcheck shell=bash disable=SC2329 # functions are called through `part`
# Look at a run's jobs, and at what was added to its files; they are read on by byte offset, nothing is sent twice.
#
# listed                     what Slurm lists
# file NAME SIZE OFFSET      the bytes of a file of this size from the offset on, in base64

declare directory
declare chunk_bytes # of one file in one look
declare logs        # yes: the logs, too
declare -a files
declare -A known # how much of each file is there already

# In base64: the answer is read as text, and a chunk may begin or end within a character.
chunk() {
  tail -c "+$(($2 + 1))" "$1" | head -c "$chunk_bytes" | base64 -w 0
}

part listed listed
cd "$directory" || exit
[ -z "$logs" ] || files+=(logs/*.log)
for file in "${files[@]}"; do
  [ -f "$file" ] || continue
  size=$(stat -c %s "$file")
  offset=${known[$file]:-0}
  if [ "$size" -lt "$offset" ]; then offset=0; fi # the file was begun again
  if [ "$size" -gt "$offset" ]; then part "file $file $size $offset" chunk "$file" "$offset"; fi
done
exit 0
