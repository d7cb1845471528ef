# shellcheck shell=bash
# What stands in front of every script here.
#
# An answer is parts:
#   @ NAME        begins one
#   LINE          what its command printed; a line that looks like these two has a blank more at its front
#   @ end CODE    ends it, with the command's exit code; a part without this line was cut off
# What stands outside of parts, as a login shell's greeting, is no answer. launch/remote/__init__.py reads it.

# A launcher that runs inside of an allocation leaves it: what Slurm told that one would be options of what starts here.
if [ -n "${SLURM_JOB_ID:-}" ]; then
  for variable in "${!SLURM_@}"; do
    case $variable in SLURM_CONF*) ;; *) unset "$variable" ;; esac
  done
fi

# What a start-up exports would be options of what starts here, too, before those of a script (sbatch(1)), or leave jobs
# out of what is listed (squeue(1)). Whom jobs are charged to may be said that way.
for variable in "${!SBATCH_@}" "${!SQUEUE_@}" "${!SCANCEL_@}"; do
  case $variable in SBATCH_ACCOUNT | SBATCH_QOS | SBATCH_RESERVATION) ;; *) unset "$variable" ;; esac
done
export SLURM_TIME_FORMAT=standard

# own_options <SCRIPT: forget what is exported of that which the script says itself.
own_options() {
  local said option
  said=$(grep '^#SBATCH --')
  for option in account qos reservation; do
    if grep -q "^#SBATCH --$option" <<<"$said"; then unset "SBATCH_${option^^}"; fi
  done
}

echo # a greeting may have left its line open

# part NAME COMMAND [ARGUMENT]...: answer what a command prints; returns its exit code.
part() {
  echo "@ $1"
  # The C locale takes bytes that are no text in another one.
  "${@:2}" | LC_ALL=C awk '{ sub(/^ *@ /, " &"); print }'
  local code=${PIPESTATUS[0]}
  echo "@ end $code"
  return "$code"
}

# remove DIRECTORY: remove a site's directory, and that of its run if it was the last there.
#
# What was cancelled may write there until it has ended, and NFS keeps files that are open: then once more.
remove() {
  local left
  for ((left = 10; left > 0; left--)); do
    rm -rf -- "$1" 2>/dev/null
    [ -e "$1" ] || break
    sleep 0.5
  done
  rmdir -- "${1%/*}" 2>/dev/null
}
