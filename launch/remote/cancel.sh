# shellcheck shell=bash disable=SC2329 # functions are called through `part`
# Cancel every job of the run that waits or runs.
#
# silent       what Slurm said instead of listing the jobs
# cancel ID    what scancel said
# tried        each of them was

declare directory
declare removes # yes: remove the directory, too; a job that Slurm takes up late then finds nothing and ends at once
declare ask_seconds
declare -a at

# Its input is none, as the loop below reads the ids from its own.
cancel() {
  timeout "$ask_seconds" scancel "${at[@]}" "$1" 2>&1 </dev/null
}

rows=$(listed) || {
  [ -z "$removes" ] || remove "$directory"
  part silent echo "$rows"
  exit
}
# The elements of an array and the components of a heterogeneous job have one id to cancel.
living <<<"$rows" | sed 's/[_+|].*//' | sort -u | while read -r id; do part "cancel $id" cancel "$id"; done
[ -z "$removes" ] || remove "$directory"
part tried true
