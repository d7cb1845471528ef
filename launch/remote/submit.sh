# shellcheck shell=bash disable=SC2329 # functions are called through `part`
# Submit the jobs that are not there yet, and say what is there afterwards; run twice, it does nothing twice.
#
# A job is there if the site wrote its id down, or if Slurm lists its key. One that sbatch was asked for and did not
# answer about is looked up and never asked for again: it may still come. With `again` a job that has ended is none.
#
# absent | damaged | busy | silent    why it ended before the first sbatch
# refused JOB                         what sbatch said, and its exit code; this ended the submission
# recorded                            JOB ID, for each job whose id is written down
# listed                              what Slurm lists

declare directory
declare manifest # the digests of all that was sent
declare lock_seconds sbatch_seconds
declare unanswered # the exit code of timeout(1)
declare unsure     # a pattern: sbatch lost its controller, which may have taken the job all the same
declare -a jobs    # JOB KEY ...
declare again      # yes: what has ended is submitted once more

cd "$directory" 2>/dev/null || { part absent true; exit; }
sha256sum --quiet --check "$manifest" >.damage 2>&1 || { part damaged head -n 3 .damage; exit; }

# One process at a time does this, for a launcher that was killed may have left one behind that is still at it.
# flock(1) ends with 1 then, and with another code on a file system without locks. What is started here does not
# keep the lock (9>&-).
exec 9>.submitting
flock --wait "$lock_seconds" 9 2>/dev/null || [ $? -ne 1 ] || { part busy true; exit; }

mkdir -p jobs
before=$(listed 9>&-) || { part silent echo "$before"; exit; }

# Forget the ids of jobs that have ended, and what their tasks left for the gateway.
if [ -n "$again" ]; then
  before=$(living <<<"$before")
  for ((i = 0; i < ${#jobs[@]}; i += 2)); do
    case "$before" in *"|${jobs[i + 1]}|"*) continue ;; esac
    if [ -s "jobs/${jobs[i]}" ]; then rm -f "jobs/${jobs[i]}" "jobs/${jobs[i]}.asked" "ended/${jobs[i]}".*; fi
  done
fi

# submit JOB KEY
submit() {
  if [ -s "jobs/$1" ]; then return; fi
  case "$before" in *"|$2|"*) return ;; esac
  if [ -e "jobs/$1.asked" ]; then
    part "refused $1" refusal "$unanswered" /dev/null
    return 1
  fi
  touch "jobs/$1.asked"
  local id code
  id=$(timeout "$sbatch_seconds" sbatch --parsable "scripts/$1.sbatch" 2>.error 9>&-)
  code=$?
  if [ "$code" -eq 0 ]; then
    echo "${id%%;*}" >"jobs/$1" # a cluster's name may follow
    return
  fi
  part "refused $1" refusal "$code" .error
  if [ "$code" -ne "$unanswered" ] && ! grep -qiE "$unsure" .error; then rm "jobs/$1.asked"; fi
  return 1
}

# refusal CODE FILE
refusal() {
  cat "$2"
  return "$1"
}

recorded() {
  for job in jobs/*; do
    if [ -s "$job" ]; then echo "${job#jobs/} $(cat "$job")"; fi
  done
}

for ((i = 0; i < ${#jobs[@]}; i += 2)); do
  submit "${jobs[i]}" "${jobs[i + 1]}" || break
done
part recorded recorded
part listed listed 9>&-
exit 0
