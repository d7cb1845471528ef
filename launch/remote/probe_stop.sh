# shellcheck shell=bash
# End all tasks of a site that measures, those that still wait too, and remove what lies at a Slurm site.
#
# left JOB ID    scancel did not answer

declare directory executor
declare jobs # the file that lists them: JOB ID
declare ask_seconds
declare end_seconds # that a process of this machine has to end
declare -a at       # `-M CLUSTER`, or nothing for that of the login node

end_process() {
  kill -INT "$1" 2>/dev/null # submitit's way to cancel
  for ((i = 0; i < 10 * end_seconds; i++)); do
    kill -0 "$1" 2>/dev/null && sleep 0.1
  done
  kill -KILL "$1" 2>/dev/null
}

cd "$directory" 2>/dev/null || exit 0
if [ -e "$jobs" ]; then
  while read -r name id; do
    if [ "$executor" = local ]; then
      end_process "$id"
    else
      # Its input is none, as this loop reads the jobs from its own.
      timeout "$ask_seconds" scancel "${at[@]}" "$id" </dev/null || part "left $name $id" true
    fi
  done <"$jobs"
fi
[ "$executor" = local ] || { cd / && remove "$directory"; }
exit 0
