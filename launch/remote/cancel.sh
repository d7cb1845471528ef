# shellcheck shell=bash disable=SC2329 # functions are called through `part`
# Cancel every job of the run that waits or runs.
#
# busy         a submission has been at work here for too long: what it submits yet is not cancelled
# silent       what Slurm said instead of listing the jobs
# cancel ID    what scancel said
# tried        each of them was

declare directory
declare removes # yes: remove the directory, too; a job that Slurm takes up late then finds nothing and ends at once
declare ask_seconds lock_seconds
declare -a at

# Its input is none, as the loop below reads the ids from its own.
cancel() {
  timeout "$ask_seconds" scancel "${at[@]}" "$1" 2>&1 </dev/null
}

# A submission that is at work here, of a launcher that was killed meanwhile, ends first.
if { exec 9>"$directory/.submitting"; } 2>/dev/null; then
  flock --wait "$lock_seconds" 9 2>/dev/null || [ $? -ne 1 ] || part busy true
fi
rows=$(listed 9>&-) || {
  exec 9>&-
  [ -z "$removes" ] || remove "$directory"
  part silent echo "$rows"
  exit
}
# The elements of an array and the components of a heterogeneous job have one id to cancel.
living <<<"$rows" | sed 's/[_+|].*//' | sort -u | while read -r id; do part "cancel $id" cancel "$id"; done
exec 9>&- # NFS keeps a file that is open, and with it its directory
[ -z "$removes" ] || remove "$directory"
part tried true
