#!/usr/bin/env bash
# Builds sallyport/base as a tar for `docker import`: Debian with python3, pip, venv, requests, git, curl, node, npm and
# ca-certificates. Needs no container registry, only Debian's packages and npm's own tarball, pinned with its hash: Debian's
# npm package is 350 packages and 105 MB more than this one.
#   images/base.sh OUTPUT.tar
set -euo pipefail
readonly NPM_VERSION=10.9.9 # the last line that runs on Debian's Node
readonly NPM_SHA512=1g+6jLQvaIuB4zwvHL7yrXuXcWZwDsCtBX8bbWDqbvJSSr9nPiDDWTHNgwXR27iIcTTW7v3A57hDW9RYv2W4Yg==
out=$1
work=$(mktemp -d "${out%/*}/base.XXXXXX")
trap 'rm -rf --one-file-system "$work" "$out.part"' EXIT
debootstrap --variant=minbase --include=python3,python3-pip,python3-venv,python3-requests,git,curl,nodejs,ca-certificates \
  bookworm "$work/root" >"$work/log" 2>&1 || { tail -n 20 "$work/log" >&2; exit 1; }
curl -fsS --max-time 300 -o "$work/npm.tgz" "https://registry.npmjs.org/npm/-/npm-$NPM_VERSION.tgz"
[ "$(openssl dgst -sha512 -binary "$work/npm.tgz" | base64 -w0)" = "$NPM_SHA512" ] || { echo "npm: wrong hash" >&2; exit 1; }
npm=$work/root/usr/local/lib/node_modules/npm
mkdir -p "$npm"
tar --no-same-owner --strip-components=1 -C "$npm" -xzf "$work/npm.tgz"
rm -rf "$npm/docs" "$npm/man"
echo 'prefix = /usr/local' >"$npm/npmrc"
for name in npm npx; do ln -s "../lib/node_modules/npm/bin/$name-cli.js" "$work/root/usr/local/bin/$name"; done
# The mark keeps pip from changing packages that apt owns. A sandbox is a container of its own, made for one task and removed
# with it: plain `pip install` works in it, as root too. dpkg does not put the mark back when it upgrades Python.
rm "$work"/root/usr/lib/python3.*/EXTERNALLY-MANAGED
echo 'path-exclude=/usr/lib/python3.*/EXTERNALLY-MANAGED' >"$work/root/etc/dpkg/dpkg.cfg.d/sallyport"
rm -rf "$work"/root/var/cache/apt/archives/*.deb "$work"/root/var/lib/apt/lists/* "$work"/root/dev/*
: >"$work/root/etc/machine-id"
rm -f "$work/root/etc/hostname" "$work/root/etc/resolv.conf"
touch "$work/root/etc/hostname" "$work/root/etc/resolv.conf"
tar --numeric-owner --sort=name -C "$work/root" -cf "$out.part" .
mv "$out.part" "$out"
