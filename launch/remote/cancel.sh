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
declare -a ended # the states of jobs that neither wait nor run

living() {
  local id state
  echo "$rows" | while IFS='|' read -r id _ state _; do
    if [ -n "$state" ] && [[ " ${ended[*]} " != *" $state "* ]]; then echo "${id%%[_+]*}"; fi
  done | sort -u # the elements of an array and the components of a heterogeneous job have one id to cancel
}

# Its input is none, as the loop below reads the ids from its own.
cancel() {
  timeout "$ask_seconds" scancel "${at[@]}" "$1" 2>&1 </dev/null
}

rows=$(listed) || {
  [ -z "$removes" ] || remove "$directory"
  part silent echo "$rows"
  exit
}
living | while read -r id; do part "cancel $id" cancel "$id"; done
[ -z "$removes" ] || remove "$directory"
part tried true
