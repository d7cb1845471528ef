# shellcheck shell=bash
# Write small files into a directory of a site, in this order, each in one go.

declare directory
declare -a files # NAME TEXT ...

cd "$directory" || exit
for ((i = 0; i < ${#files[@]}; i += 2)); do
  mkdir -p "$(dirname "${files[i]}")" || exit
  # Beside the file: two that bring different ones to a directory at the same time do not meet.
  printf %s "${files[i + 1]}" >"${files[i]}.part" && mv "${files[i]}.part" "${files[i]}" || exit
done
