#!/usr/bin/env bash
# Builds a tar for `docker import` as a user would make an image: Debian with its default Java, and nothing of ours. For the
# tests. Needs no container registry, only Debian's packages.
#   images/java.sh OUTPUT.tar
set -euo pipefail
out=$1
work=$(mktemp -d "${out%/*}/java.XXXXXX")
trap 'rm -rf --one-file-system "$work" "$out.part"' EXIT
debootstrap --variant=minbase --include=default-jre-headless bookworm "$work/root" >"$work/log" 2>&1 ||
  { tail -n 20 "$work/log" >&2; exit 1; }
rm -rf "$work"/root/var/cache/apt/archives/*.deb "$work"/root/var/lib/apt/lists/* "$work"/root/dev/* "$work"/root/usr/share/doc
tar --numeric-owner --sort=name -C "$work/root" -cf "$out.part" .
mv "$out.part" "$out"
