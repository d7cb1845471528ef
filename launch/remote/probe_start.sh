# shellcheck shell=bash
# Start the tasks of a site that measures. What is started keeps no hold of this script's output.
#
# started    JOB ID, for each job

declare directory
declare python code # the interpreter that starts the tasks, and where it finds hetrl
declare tasks       # the file that lists them
declare -a setup

cd "$directory" || exit
# shellcheck source=launch/remote/setup.sh
. "$code/launch/remote/setup.sh" "${setup[@]}"
"$python" -c '' 2>/dev/null || python=python3 # that of the nodes may be for another machine than this one
export PYTHONPATH=$code PYTHONUNBUFFERED=1
"$python" -m launch.cli remote-task "$tasks" >started 2>start.log </dev/null
code=$?
part started cat started
cat start.log >&2
exit $code
