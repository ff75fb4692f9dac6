#!/bin/bash
# Entry point of the code-interpreter image: keeps the Jupyter server running for as long as the sandbox lives.
# Each language has one version here. Another that PYTHON_VERSION, JAVA_VERSION, NODE_VERSION or GO_VERSION asks for is
# said to be missing, and what there is serves.
here=/opt/code-interpreter
for language in PYTHON JAVA NODE GO; do
  asked=${language}_VERSION
  asked=${!asked:-}
  [ -n "$asked" ] || continue
  present=
  while read -r name version; do [ "$name" = "$language" ] && present=$version; done <"$here/versions"
  case $present. in
    "$asked".*) ;;
    *) echo "code-interpreter: ${language}_VERSION asks for $asked; this image has ${present:-none}" >&2 ;;
  esac
done
trap 'exit 143' TERM INT
while :; do
  /usr/bin/python3 -IS "$here/server.py"
  echo "code-interpreter: the Jupyter server has ended with status $?; starting it again" >&2
  sleep 0.2
done
