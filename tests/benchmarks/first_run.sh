#!/usr/bin/env bash
# Times `make run` in a fresh clone of the last commit: once with the installation, and once more without it.
#
#     bash tests/benchmarks/first_run.sh
#
# Packages that pip has in its cache are not downloaded again.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
git clone -q "$(git rev-parse --show-toplevel)" "$folder/clone"
cd "$folder/clone"
export OPTEXPORT_CACHE="$folder/cache"
for title in "with the installation" "again"; do
  start=$SECONDS
  make run >"$folder/log" 2>&1 || { cat "$folder/log"; exit 1; }
  echo "make run, $title: $((SECONDS - start)) s"
done
echo "size of the environment: $(du -sh .venv | cut -f1)"
