# shellcheck shell=bash disable=SC2329 # functions are called through `part`
# Whether a run could start at a site: a part for each question. discover.sh stands in front of it.
#
# test JOB       what sbatch says of a job: when it would start; nothing is queued
# clock          seconds since the epoch
# programs       those that are missing
# controller     UP, in some sentence, where it answers
# scratch        what df says of the directory, which can be written to
# setup          the lines that fail, those that load modules first
# environment    the versions of packages, as JSON in the last line
# models         the directories of models that are not there
# data           whether the data can be read, where the site may need it: the exit code
# queue          the partitions of each job that waits
# egress         whether the relay or proxy answers, if there is one: the exit code

declare sbatch_seconds
declare -a jobs # JOB SCRIPT ...
declare -a programs setup
declare scratch
declare -a models # their directories
declare data      # a file or directory, nothing where the site does not read it
declare -a versions # the command that prints them, none where only jobs can
declare host port   # of the relay or proxy
declare -a at       # `-M CLUSTER`, or nothing for that of the login node

# Times are in UTC.
tested() {
  own_options <<<"$1"
  printf %s "$1" | TZ=UTC timeout "$sbatch_seconds" sbatch --test-only 2>&1
}

missing() {
  for program in "${programs[@]}"; do
    command -v "$program" >/dev/null || echo "$program"
  done
}

# `scontrol ping` asks the login node's own controller, whatever -M says.
controller() {
  local said
  if [ ${#at[@]} -eq 0 ]; then
    scontrol ping 2>&1
  elif said=$(scontrol "${at[@]}" show config 2>&1); then
    echo "Slurmctld of ${at[1]} is UP"
  else
    echo "$said"
  fi
}

# In the directory that the runs of all users of this scratch have.
space() {
  local place=$scratch/hetrl
  local file=$place/.hetrl-$$
  { mkdir -p "$place" && echo x >"$file" && rm "$file" && df -Pk "$place"; } 2>&1
}

# In order, as one line may need another.
failing() {
  for line in "${setup[@]}"; do
    eval "$line" >/dev/null 2>&1 </dev/null || echo "$line"
  done
}

environment() {
  {
    for line in "${setup[@]}"; do eval "$line" </dev/null; done
    "${versions[@]}"
  } 2>&1
}

without() {
  for model in "${models[@]}"; do
    [ -r "$model/config.json" ] || echo "$model"
  done
}

waiting() {
  timeout "$sbatch_seconds" squeue "${at[@]}" --local --noheader --array --states=PENDING --format=%P 2>&1
}

knock() {
  # shellcheck disable=SC2016
  timeout 5 bash -c 'exec 3<>"/dev/tcp/$1/$2"' knock "$host" "$port" 2>&1
}

for ((i = 0; i < ${#jobs[@]}; i += 2)); do
  part "test ${jobs[i]}" tested "${jobs[i + 1]}"
done
part clock date +%s.%N
part programs missing
part controller controller
part scratch space
part setup failing
[ ${#versions[@]} -eq 0 ] || part environment environment
part models without
[ -z "$data" ] || part data test -r "$data"
part queue waiting
[ -z "$port" ] || part egress knock
exit 0
