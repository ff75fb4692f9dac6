#!/usr/bin/env bash
# Updates the pins of the code-interpreter image's PyPI packages: run images/code-interpreter/pin.sh, then build and test.
# It leaves out packages that neither a server of kernels only nor a kernel without a debugger imports.
set -euo pipefail
cd "$(dirname "$(readlink -f "$0")")"
not_served=(argon2-cffi argon2-cffi-bindings arrow beautifulsoup4 bleach cffi defusedxml fqdn idna isoduration jsonpointer
  jupyter-server-terminals jupyterlab-pygments lark mistune nbclient nbconvert pandocfilters ptyprocess pycparser pygments
  rfc3339-validator rfc3986-validator rfc3987-syntax six soupsieve terminado tinycss2 tzdata uri-template webcolors
  webencodings)

pin() {
  local file=$1 options=() name
  shift
  for name in "$@"; do options+=(--no-emit-package "$name"); done
  "${UV:-uv}" pip compile --quiet --generate-hashes --no-annotate --python-version 3.11 --no-strip-markers \
    --custom-compile-command images/code-interpreter/pin.sh "${options[@]}" --output-file "$file" --upgrade -
}

echo jupyter-server | pin server.txt "${not_served[@]}"
printf '%s\n' bash-kernel deno ipykernel 'jjava>=1.0a8' | pin kernels.txt debugpy
