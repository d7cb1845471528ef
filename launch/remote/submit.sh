# shellcheck shell=bash disable=SC2329 # functions are called through `part`
# Submit the jobs that are not there yet, and say what is there afterwards; run twice, it does nothing twice.
#
# A job is there if the site wrote its id down, or if Slurm lists its key. One that sbatch was asked for and did not
# answer about is looked up and never asked for again: it may still come. With `again` a job that has ended is none.
# One that takes over the nodes of a job of an earlier run is that job, under its own key from then on.
#
# absent | damaged | busy | silent    why it ended before the first sbatch
# refused JOB                         what sbatch said, and its exit code; this ended the submission
# recorded                            JOB ID, for each job whose id is written down
# listed                              what Slurm lists

declare directory
declare manifest # the digests of all that was sent
declare lock_seconds sbatch_seconds ask_seconds
declare -a at
declare unanswered # the exit code of timeout(1)
declare lost_minutes # after which a job comes no more that sbatch did not answer about and Slurm does not list
declare unsure     # a pattern: sbatch lost its controller, which may have taken the job all the same
declare -a jobs    # JOB KEY TAKES TASKS ...: TAKES is the key of the job whose nodes this one takes over, or nothing
declare held       # stands before the name of a job that holds its nodes
declare held_seconds # that a job has until it holds its nodes, once its members are told to end
declare earlier    # the directory of the run that that one is of
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
  all=$before
  before=$(living <<<"$before")
  for ((i = 0; i < ${#jobs[@]}; i += 4)); do
    case "$before" in *"|${jobs[i + 1]}|"*) continue ;; esac
    if [ -s "jobs/${jobs[i]}" ] || [[ $all == *"|${jobs[i + 1]}|"* ]] ||
      [ "$(find "jobs/${jobs[i]}.asked" -mmin "+$lost_minutes" 2>/dev/null)" ]; then
      rm -f "jobs/${jobs[i]}" "jobs/${jobs[i]}.asked" "ended/${jobs[i]}".*
    fi
  done
fi

# rows_of TAKES: the elements that have not ended of a job of the earlier run, whether they hold their nodes or not.
rows_of() {
  timeout "$ask_seconds" squeue "${at[@]}" --me --local --all --noheader --array --states=PENDING,RUNNING \
    --name="$1,$held$1" --format='%i|%j|%T' 2>/dev/null 9>&-
}

# ask PROGRAM [ARGUMENT]...: one of Slurm's clients that says nothing.
ask() {
  timeout "$ask_seconds" "$1" "${at[@]}" "${@:2}" >/dev/null 2>&1 9>&-
}

# end_members TAKES: members of a job of the earlier run that have heard nothing of its end hear it now. This comes before
# any job goes on, as it would end the members of this run; and a gateway waits for those of the arrays.
end_members() {
  local rows
  rows=$(rows_of "$1")
  if grep -q "|$1|RUNNING" <<<"$rows"; then ask scancel --signal=TERM "${rows%%[!0-9]*}"; fi
}

# take JOB KEY TAKES TASKS: let the job go on as this one, once all of it holds its nodes; what does not is cancelled.
take() {
  local rows id deadline=$((SECONDS + held_seconds))
  while true; do
    if ! rows=$(rows_of "$3"); then # squeue did not answer: whether there is one is not known
      if [ "$SECONDS" -gt "$deadline" ]; then return 1; fi
      sleep 1
      continue
    fi
    id=${rows%%[!0-9]*}
    if [ -z "$id" ]; then return 1; fi
    if [ "$(wc -l <<<"$rows")" -lt "$4" ] || [ "$SECONDS" -gt "$deadline" ]; then break; fi
    if ! grep -q "|$3|RUNNING" <<<"$rows"; then
      ask scontrol update "JobId=$id" "JobName=$2" || break
      echo "$id" >"jobs/$1"
      hand "$1"
      return 0
    fi
    sleep 1
  done
  ask scancel "$id"
  return 1
}

# hand JOB: tell the job of the earlier run where it goes on.
hand() {
  if [ ! -d "$earlier" ]; then return; fi
  mkdir -p "$earlier/handed"
  echo "$directory" >"$earlier/handed/.$1"
  mv "$earlier/handed/.$1" "$earlier/handed/$1"
}

# submit JOB KEY TAKES TASKS
submit() {
  if [ -s "jobs/$1" ]; then return; fi
  case "$before" in *"|$2|"*)
    if [ -n "$3" ]; then hand "$1"; fi # by a launcher that ended in between
    return
    ;;
  esac
  if [ -n "$3" ] && take "$@"; then return; fi
  if [ -e "jobs/$1.asked" ]; then
    part "refused $1" refusal "$unanswered" /dev/null
    return 1
  fi
  touch "jobs/$1.asked"
  local id code
  id=$(
    own_options <"scripts/$1.sbatch"
    timeout "$sbatch_seconds" sbatch --parsable "scripts/$1.sbatch" 2>.error 9>&-
  )
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

for ((i = 0; i < ${#jobs[@]}; i += 4)); do
  if [ -n "${jobs[i + 2]}" ]; then end_members "${jobs[i + 2]}"; fi
done
for ((i = 0; i < ${#jobs[@]}; i += 4)); do
  submit "${jobs[@]:i:4}" || break
done
part recorded recorded
part listed listed 9>&-
exit 0
