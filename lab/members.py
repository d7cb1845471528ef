"""Jobs for the tests of the launcher: scripts in place of the engines, through `launch.templates`.

A gang runs until a file `end` appears in its site's directory; at the lead site it plays the controller then, and
before that it has said GO.
"""

from __future__ import annotations

GANG = """\
#!/bin/bash
#SBATCH --job-name={{ key | quote }}
#SBATCH --chdir={{ directory | quote }}
#SBATCH --output={{ log | quote }}
{{ resources }}
say() {
  printf '{"time": %s, "source": "alpha", "sequence": %s, %s}\\n' "$(date +%s)" "$sequence" "$1" >>events.jsonl
  sequence=$((sequence + 1))
}
sequence=0
echo "tcp://$(hostname):7001" >gateway.endpoint
echo "up on $(hostname)" >>logs/gateway.log
if [ {{ site }} = alpha ]; then say '"kind": "go", "epoch": 1, "members": ["m"]'; fi
for ((i = 0; i < 3000; i++)); do
  if [ -e fail ]; then echo 'RuntimeError: told to fail' >>logs/gateway.log; exit 3; fi
  if [ -e end ]; then break; fi
  sleep 0.2
done
if [ {{ site }} = alpha ]; then say '"kind": "finished"'; fi
"""
ARRAY = """\
#!/bin/bash
#SBATCH --job-name={{ key | quote }}
#SBATCH --array=0-{{ last }}
#SBATCH --chdir={{ directory | quote }}
#SBATCH --output={{ log | quote }}
{{ resources }}
for ((i = 0; i < 3000; i++)); do if [ -e end ]; then exit; fi; sleep 0.2; done
"""
