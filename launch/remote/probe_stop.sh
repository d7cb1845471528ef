# shellcheck shell=bash
# End all tasks of a site that are processes of this machine, those that still wait too.

declare directory
declare jobs        # the file that lists them: JOB ID
declare end_seconds # that a process has to end

end_process() {
  kill -INT "$1" 2>/dev/null # submitit's way to cancel
  for ((i = 0; i < 10 * end_seconds; i++)); do
    kill -0 "$1" 2>/dev/null && sleep 0.1
  done
  kill -KILL "$1" 2>/dev/null
}

cd "$directory" 2>/dev/null && [ -e "$jobs" ] || exit 0
while read -r _ id; do end_process "$id"; done <"$jobs"
exit 0
