# shellcheck shell=bash
# What a cluster has: a part for each question to scontrol. Partitions may be hidden from those who do not ask for all.

declare -a at # `-M CLUSTER`, or nothing for that of the login node

part version scontrol --version
part config scontrol "${at[@]}" show config
part federation scontrol "${at[@]}" show federation 2>/dev/null
part partitions scontrol "${at[@]}" --all --oneliner show partition
part nodes scontrol "${at[@]}" --all --oneliner --details show node
part topology scontrol "${at[@]}" --oneliner show topology 2>/dev/null
part reservations scontrol "${at[@]}" --oneliner show reservation
