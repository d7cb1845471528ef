# shellcheck shell=bash
# What a cluster has: a part for each question to scontrol.

declare -a at # `-M CLUSTER`, or nothing for that of the login node

part version scontrol --version
part config scontrol "${at[@]}" show config
part federation scontrol "${at[@]}" show federation 2>/dev/null
part partitions scontrol "${at[@]}" --oneliner show partition
part nodes scontrol "${at[@]}" --oneliner --details show node
part topology scontrol "${at[@]}" --oneliner show topology 2>/dev/null
part reservations scontrol "${at[@]}" --oneliner show reservation
