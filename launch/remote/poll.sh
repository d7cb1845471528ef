# shellcheck shell=bash disable=SC2329 # functions are called through `part`
# Look at a run's jobs, and at what was added to its files; they are read on by byte offset, nothing is sent twice.
#
# listed                     what Slurm lists
# file NAME SIZE OFFSET      the bytes of a file of this size from the offset on, in base64
# more                       the files behind these were not looked at

declare directory
declare chunk_bytes # of one file in one look
declare look_bytes  # of all files in one look, but for the last one
declare logs        # yes: the logs, too
declare -a files
declare -a whole # those of them that are sent as a whole, whatever their size
declare -A known # how much of each file is there already

# In base64: the answer is read as text, and a chunk may begin or end within a character.
chunk() {
  tail -c "+$(($2 + 1))" "$1" | head -c "$3" | base64 -w 0
}

part listed listed
cd "$directory" || exit
[ -z "$logs" ] || files+=(logs/*.log)
sent=0
for file in "${files[@]}"; do
  [ -f "$file" ] || continue
  size=$(stat -c %s "$file")
  offset=${known[$file]:-0}
  if [ "$size" -lt "$offset" ]; then offset=0; fi # the file was begun again
  if [ "$size" -le "$offset" ]; then continue; fi
  left=$((size - offset))
  case " ${whole[*]} " in
    *" $file "*) ;;
    *) if [ "$left" -gt "$chunk_bytes" ]; then left=$chunk_bytes; fi ;;
  esac
  part "file $file $size $offset" chunk "$file" "$offset" "$left"
  sent=$((sent + left))
  if [ "$sent" -ge "$look_bytes" ]; then
    part more true
    break
  fi
done
exit 0
