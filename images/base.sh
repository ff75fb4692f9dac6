#!/usr/bin/env bash
# Builds sallyport/base as a tar for `docker import`: Debian with python3, pip, requests, git, curl, ca-certificates.
# Needs no container registry, only Debian's packages.
#   images/base.sh OUTPUT.tar
set -euo pipefail
out=$1
work=$(mktemp -d "${out%/*}/base.XXXXXX")
trap 'rm -rf --one-file-system "$work" "$out.part"' EXIT
debootstrap --variant=minbase --include=python3,python3-pip,python3-requests,git,curl,ca-certificates \
  bookworm "$work/root" >"$work/log" 2>&1 || { tail -n 20 "$work/log" >&2; exit 1; }
rm -rf "$work"/root/var/cache/apt/archives/*.deb "$work"/root/var/lib/apt/lists/* "$work"/root/dev/*
: >"$work/root/etc/machine-id"
rm -f "$work/root/etc/hostname" "$work/root/etc/resolv.conf"
touch "$work/root/etc/hostname" "$work/root/etc/resolv.conf"
tar --numeric-owner --sort=name -C "$work/root" -cf "$out.part" .
mv "$out.part" "$out"
