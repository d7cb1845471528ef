# shellcheck shell=bash disable=SC2329 # functions are called through `part`
# The jobs of a run as Slurm knows them, for the scripts that stand behind this one.

declare keys        # the names of the jobs, a comma between two
declare ask_seconds # that a client of Slurm has: a controller that hangs is an answer, and not a lost connection
declare -a at       # `-M CLUSTER`, or nothing for that of the login node

# Those that ended lately, and those in partitions that are hidden, too; times are in UTC.
listed() {
  TZ=UTC timeout "$ask_seconds" squeue "${at[@]}" --me --local --all --noheader --states=all --name="$keys" \
    --format='%i|%j|%T|%V|%S|%N|%r' 2>&1
}
