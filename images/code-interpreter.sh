#!/usr/bin/env bash
# Builds sallyport/code-interpreter as a tar for `docker import`: the base image with a Jupyter server on loopback and
# kernels for Python, Bash, JavaScript, TypeScript, Java and Go, where the code-interpreter SDKs look for them.
# Needs no container registry, only Debian's packages and those of PyPI, pinned with their hashes, and uv (its path in $UV).
#   images/code-interpreter.sh OUTPUT.tar BASE.tar
set -euo pipefail
out=$1 base=$2
parts=$(dirname "$(readlink -f "$0")")/code-interpreter
work=$(mktemp -d "${out%/*}/code.XXXXXX")
trap 'rm -rf --one-file-system "$work" "$out.part"' EXIT
root=$work/root home=$work/root/opt/code-interpreter site=$work/root/usr/local/lib/python3.11/dist-packages

install_python() {
  "${UV:-uv}" pip install --quiet --no-deps --require-hashes --only-binary :all: --link-mode copy --python-version 3.11 \
    --python-platform "$(uname -m)-manylinux_2_28" --target "$1" --requirements "$parts/$2"
}

# Runs in a namespace of its own: what it mounts goes with it.
install_packages() {
  mount -t proc proc "$root/proc"
  mount --bind /dev "$root/dev"
  mount --bind "$(readlink -f /etc/resolv.conf)" "$root/etc/resolv.conf"
  chroot "$root" apt-get update -q
  DEBIAN_FRONTEND=noninteractive chroot "$root" apt-get install -q -y --no-install-recommends openjdk-17-jre-headless golang-go
}

mkdir "$root"
tar -C "$root" -xf "$base"
export -f install_packages
export root
unshare --mount --pid --fork bash -euc install_packages
rm -rf "$root"/var/cache/apt/* "$root"/var/lib/apt/lists/*
rm -rf "$root"/usr/lib/go-*/pkg/linux_*/cmd "$root"/usr/share/go-*/src/cmd # Go's parts for building Go itself
install -D -t "$home" "$parts/code-interpreter.sh"
install -m 0644 -t "$home" "$parts/server.py" "$parts/bash.py" "$parts/go.py"
# The server has its libraries to itself: nothing that a sandbox installs can break it. The kernels are the sandbox's.
install_python "$home/lib" server.txt
install_python "$site" kernels.txt
mv "$site/bin/deno" "$root/usr/local/bin/deno"
install -m 0644 -t "$home" "$site"/share/jupyter/kernels/java/*.jar
rm -rf "$home/lib/bin" "$site/bin" "$site/share"
cp -R "$parts/kernels" "$root/usr/local/share/jupyter"
ln -s /usr/bin/python3 "$root/usr/local/bin/python"
chroot "$root" /usr/bin/python3 -m compileall -q /opt/code-interpreter /usr/local/lib/python3.11/dist-packages
chroot "$root" /usr/bin/python3 -c 'import platform; print("PYTHON", platform.python_version())' >"$home/versions"
echo "JAVA $(chroot "$root" dpkg-query -W -f '${Version}' openjdk-17-jre-headless)" >>"$home/versions"
echo "GO $(chroot "$root" go env GOVERSION | sed s/^go//)" >>"$home/versions"
tar --numeric-owner --sort=name -C "$root" -cf "$out.part" .
mv "$out.part" "$out"
