# shellcheck shell=bash disable=SC2329 # functions are called through `part`
# Which of a run's jobs go on, for the scripts that stand behind this one.

declare -a ended # the states of jobs that neither wait nor run

# Of the rows that `listed` of jobs.sh printed, those of jobs that wait or run.
living() {
  local id key state rest
  while IFS='|' read -r id key state rest; do
    if [ -n "$state" ] && [[ " ${ended[*]} " != *" $state "* ]]; then echo "$id|$key|$state|$rest"; fi
  done
}
