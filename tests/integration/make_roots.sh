#!/bin/sh
# Root file systems of Debian releases whose CPython is newer than this machine's, for `make test-pythons ROOTS=1`:
# make_roots.sh FOLDER RELEASE.. From the mirror that apt uses. As root; what is there already is left alone.
set -eu
folder=$1
shift
command -v debootstrap >/dev/null || DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends debootstrap
mirror=$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' 'Origin: Debian' 'Label: Debian' | head -n 1)
if [ -z "$mirror" ]; then
  echo "no Debian mirror among apt's sources" >&2
  exit 1
fi
for release in "$@"; do
  [ -e "$folder/$release/made" ] && continue
  rm -rf "${folder:?}/$release"
  mkdir -p "$folder"
  if ! debootstrap --variant=minbase --include=python3 "$release" "$folder/$release" "$mirror" >"$folder/$release.log" 2>&1; then
    tail -n 20 "$folder/$release.log" >&2
    echo "no root of $release could be made: $folder/$release.log" >&2
    exit 1
  fi
  touch "$folder/$release/made"
done
