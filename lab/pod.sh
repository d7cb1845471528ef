#!/bin/sh
# The first process of a pod (a head or a node of the lab), in namespaces of its own: lays out the files that the pod
# sees, says "ready", and then only collects orphans. Its end is the end of all processes of the pod.
# usage: pod.sh RUN_DIRECTORY NAME SITE GPUS PATH...    PATH keeps its place even below /root, /home or /tmp
set -eu
run=$1 name=$2 site=$3 gpus=$4
shift 4

hostname "$name"
ip link set lo up
echo 1 >/proc/sys/net/ipv4/ip_forward # matters in heads, which have two networks

# An account for jobs, names of all pods; no DNS, where every failed reverse lookup would take 5 s.
for file in "$run"/etc/*; do mount --bind "$file" "/etc/${file##*/}"; done
if [ -d "$run/slurm/$site" ]; then
    mount --bind "$run/slurm/$site" /etc/slurm
fi

# /root is closed to the job user, and /home and /tmp are the pod's own. A Python, a virtual environment or a checkout
# below them is moved out of the way first and comes back at its place.
mount -t tmpfs -o mode=755 tmpfs /mnt
for path; do
    mkdir -p "/mnt$path"
    mount --bind "$path" "/mnt$path"
done
mount -t tmpfs -o mode=755 tmpfs /root
mount -t tmpfs -o mode=1777 tmpfs /tmp
mount --bind "$run/home/$site" /home # one per site, as on a cluster
for path; do
    case $path in /root/* | /home/* | /tmp/*)
        mkdir -p "$path"
        mount --bind "/mnt$path" "$path"
        ;;
    esac
done
umount --recursive /mnt
mount -t tmpfs -o mode=1777 tmpfs /dev/shm
mount -t tmpfs -o mode=755 tmpfs /run
mkdir -p /run/lock /run/munge /run/sshd /run/gpu
mount --bind "$run/munge/$site" /run/munge

# Slurm takes a link to a device for a GPU, and numbers GPUs by the digits of the name.
index=0
while [ "$index" -lt "$gpus" ]; do
    ln -s /dev/null "/run/gpu/nvidia$index"
    index=$((index + 1))
done

echo ready
exec >/dev/null
while :; do
    sleep 3600 &
    wait
done
