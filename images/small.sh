#!/usr/bin/env bash
# Builds a tar for `docker import` that has nothing of glibc: busybox, musl's loader, and no /tmp. For the tests.
# Needs no container registry, only Debian's packages.
#   images/small.sh OUTPUT.tar
set -euo pipefail
out=$1
work=$(mktemp -d "${out%/*}/small.XXXXXX")
trap 'rm -rf --one-file-system "$work" "$out.part"' EXIT
chmod 0755 "$work"
cd "$work"
apt-get -q download busybox-static musl >log 2>&1 || { apt-get -q update && apt-get -q download busybox-static musl; } >log 2>&1 ||
  { tail -n 20 log >&2; exit 1; }
mkdir -p root/bin root/etc root/home
for package in ./*.deb; do dpkg-deb -x "$package" unpacked; done
cp unpacked/bin/busybox root/bin/
cp -a unpacked/lib root/
for name in $(root/bin/busybox --list); do [ "$name" = busybox ] || ln -s busybox "root/bin/$name"; done
printf 'root:x:0:0:root:/:/bin/sh\nworker:x:1234:1235::/home:/bin/sh\n' >root/etc/passwd
printf 'root:x:0:\nworker:x:1235:\n' >root/etc/group
tar --numeric-owner --owner=0 --group=0 --sort=name -C root -cf "$out.part" .
mv "$out.part" "$out"
