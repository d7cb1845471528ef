# shellcheck shell=bash
# Write small files into a site's directory, in this order, each in one go.

declare directory
declare -a files # NAME TEXT ...

cd "$directory" || exit
for ((i = 0; i < ${#files[@]}; i += 2)); do
  mkdir -p "$(dirname "${files[i]}")" || exit
  printf %s "${files[i + 1]}" >.partial && mv .partial "${files[i]}" || exit
done
