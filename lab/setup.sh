#!/bin/bash
# Installs what the lab needs, on Debian or Ubuntu, as root; prints what, and nothing where all is there.
# No daemon is started by it: the lab starts its own.
set -euo pipefail

declare -A packages=(
    [slurmctld]=slurm-wlm [slurmdbd]=slurmdbd [munged]=munge [mariadbd]=mariadb-server [sshd]=openssh-server
    [ssh]=openssh-client [ip]=iproute2 [nft]=nftables [iperf3]=iperf3 [ping]=iputils-ping [gcc]=gcc
    [setpriv]=util-linux [ps]=procps [rsync]=rsync
)
PATH=$PATH:/usr/sbin:/sbin
missing=()
for program in "${!packages[@]}"; do
    command -v "$program" >/dev/null || missing+=("${packages[$program]}")
done
if [ ! -e /usr/include/stdio.h ]; then missing+=(libc6-dev); fi
if [ ! -e /usr/include/linux/if_tun.h ]; then missing+=(linux-libc-dev); fi
if [ "${#missing[@]}" = 0 ]; then exit 0; fi

if [ "$(id -u)" != 0 ]; then
    echo "lab: needs root to install ${missing[*]}" >&2
    exit 1
fi
if ! command -v apt-get >/dev/null; then
    echo "lab: no apt-get here; install the equivalents of: ${missing[*]}" >&2
    exit 1
fi

# policy-rc.d is how Debian's packages are told not to start their daemons; 101 means "forbidden".
policy=/usr/sbin/policy-rc.d
if [ ! -e "$policy" ]; then
    trap 'rm -f "$policy"' EXIT
    printf '#!/bin/sh\nexit 101\n' >"$policy"
    chmod 755 "$policy"
fi

log=$(mktemp)
echo "lab: installing ${missing[*]}"
if ! { apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends "${missing[@]}"; } \
    >"$log" 2>&1; then
    tail -n 20 "$log" >&2
    echo "lab: apt-get failed; the whole log is $log" >&2
    exit 1
fi
rm -f "$log"
echo "lab: installed in $SECONDS s"
