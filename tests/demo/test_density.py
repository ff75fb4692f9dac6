"""The benchmark `density`: the component of each process, and memory and processor time in the texts of the kernel."""

import os
import threading
from pathlib import Path

import pytest

from bench.components import Memory, Meter, Process, classify, members, processes, rollup, scheduled
from bench.main import main
from bench.slots import kernel_kib

RUN = Path("/run/ours")
HOSTD = Process(10, 1, ("python", "-m", "runtimes.hostd", "/run/ours/launch/host.json", ""))
ZYGOTE = Process(11, 10, ("python", "-m", "gateway.zygote", "/run/ours/config/zygote.json", ""))


def _runsc(pid: int, parent: int, program: str, run: str = "ours") -> Process:
    return Process(pid, parent, (program, f"--root=/run/{run}/docker/runtime-runc/moby", ""))


@pytest.mark.parametrize(
    ("process", "expected"),
    [
        (Process(20, 11, ZYGOTE.command), "workers"),
        (Process(20, 10, ("nft", "-i", "")), "guard"),
        (Process(20, 10, ("/usr/sbin/dockerd", "--host=unix:///run/ours/docker.sock", "")), "dockerd"),
        (Process(20, 5, ("containerd", "--config", "/run/ours/docker/containerd/containerd.toml")), "containerd"),
        (Process(20, 1, ("/usr/bin/containerd-shim-runc-v2", "-address", "/run/ours/x.sock")), "containerd-shims"),
        (_runsc(20, 5, "runsc-sandbox"), "sandboxes"),
        (_runsc(20, 5, "runsc-gofer"), "runsc gofers"),
        (_runsc(20, 5, "runsc-sandbox", "theirs"), None),
        (Process(20, 1, ("python", "-m", "runtimes.hostd", "/run/ours-too/launch/host.json")), None),
        (Process(20, 1, ("nft", "-i", "")), None),
        (Process(20, 1, ("",)), None),
    ],
)
def test_a_process_belongs_to_the_component_of_its_command_line(process: Process, expected: str | None) -> None:
    assert expected == classify((HOSTD, ZYGOTE, process), RUN).get(20)


def test_a_process_without_a_name_belongs_to_its_nearest_ancestor() -> None:
    found = classify((Process(3, 2, ("",)), Process(2, 1, ("",)), _runsc(1, 9, "runsc-sandbox"), HOSTD), RUN)
    assert {"hostd": [10], "sandboxes": [1, 2, 3]} == members(found)


def test_on_runc_the_children_of_a_shim_are_the_sandbox() -> None:
    shim = Process(5, 1, ("/usr/bin/containerd-shim-runc-v2", "-address", "/run/ours/x.sock"))
    found = classify((HOSTD, shim, Process(6, 5, ("/opt/execd", "")), Process(7, 6, ("tail", ""))), RUN)
    assert {"hostd": [10], "containerd-shims": [5], "sandboxes": [6, 7]} == members(found)


def test_parents_in_a_circle_end() -> None:
    """Pids are read one after the other. A number that is used again can make a circle."""
    assert {} == classify((Process(1, 2, ("",)), Process(2, 1, ("",))), RUN)


def test_private_memory_is_clean_and_dirty() -> None:
    first = "0-1 ---p 0 00:00 0 [rollup]\n"
    text = f"{first}Rss: 90 kB\nPss:   20 kB\nPss_Dirty: 7 kB\nPrivate_Clean: 4 kB\nPrivate_Dirty: 8 kB\n"
    assert Memory(12, 20) == rollup(text)
    assert Memory(0, 0) == rollup("")


def test_the_kernels_memory_is_that_of_its_objects_cpus_and_stacks() -> None:
    lines = ("Slab:  100 kB", "SReclaimable: 5 kB", "KernelStack:  20 kB", "Percpu:  3 kB", "PageTables: 4 kB")
    text = "\n".join(("MemTotal: 9 kB", *lines, "HugePages_Total: 0"))
    assert 127 == kernel_kib(text)


def test_processor_time_is_in_seconds() -> None:
    assert 1.5 == scheduled("1500000000 7 9\n")


def test_the_processor_time_of_a_process_and_of_a_thread_is_what_it_used() -> None:
    """This process is taken for hostd. Its first thread has the name of the process."""
    own = next(process for process in processes() if process.pid == os.getpid())
    name = Path(f"/proc/self/task/{os.getpid()}/comm").read_text().strip()
    meter = Meter({own.pid: "hostd"}, name)
    worker = threading.Thread(target=sum, args=(range(3_000_000),))
    worker.start()
    worker.join()
    seconds = meter.read()
    assert 0 < seconds["hostd"]
    assert seconds[name] <= seconds["hostd"] + 0.02  # a clock tick, twice


@pytest.mark.parametrize("arguments", [["density", "create"], ["density", "--sandboxes", "-1"]])
def test_arguments_that_cannot_be_are_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        main(arguments)
    assert 2 == refused.value.code
    assert "error" in capsys.readouterr().err
