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
