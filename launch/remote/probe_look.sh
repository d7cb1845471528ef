# shellcheck shell=bash disable=SC2329 # functions are called through `part`
# How far a site is. Nobody asks Slurm how a task is: each leaves its exit code in a file when it has ended.
#
# absent    there is nothing
# ready     where its gateway listens, once it does
# ended     TASK CODE, for each task that has ended

declare directory ready ended

codes() {
  for file in "$ended"/*; do
    if [ -s "$file" ]; then echo "${file#"$ended"/} $(cat "$file")"; fi
  done
}

cd "$directory" || { part absent true; exit; }
part ready cat "$ready" 2>/dev/null
part ended codes
exit 0
