"""The operator's part of a launch: it comes from hostd's configuration and the compiler, for every request."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import wire
from runtimes import operator
from runtimes.operator import MAX_ROOTS, Operator, worker_constants
from runtimes.spec import HostConfig
from tests.runtimes.test_spec import host_config, launch_of
from wire.api.compiler import Compile, CompiledText
from wire.api.zygote import Prepare


class Daemons:
    """A replacement for `runtimes.daemons.Daemons`; `answer` is the compiler's answer."""

    def __init__(self, answer: Callable[[], str]) -> None:
        self.answer = answer
        self.up = True

    async def reachable(self, name: str) -> None:
        assert "compiler" == name
        if not self.up:
            raise TimeoutError

    def client(self, name: str) -> "Daemons":
        assert "compiler" == name
        return self

    async def ask(self, request: Compile, timeout: float) -> CompiledText:
        assert "{}" == request.selection
        return CompiledText(self.answer())


def _raises(error: Exception) -> Callable[[], str]:
    def answer() -> str:
        raise error

    return answer


def made(tmp_path: Path, answer: Callable[[], str] = str, **changes: Any) -> Operator:
    roots = tmp_path / "roots.pem"
    if not roots.exists():
        roots.write_text("operator's roots\n")
    config = HostConfig.model_validate(host_config(upstream_roots=str(roots), **changes))
    return Operator(config, Daemons(answer), worker_constants(config).upstream_roots)  # type: ignore[arg-type]


def test_what_workers_have_in_common_is_the_operator_s(tmp_path: Path) -> None:
    roots = tmp_path / "roots.pem"
    roots.write_text("operator's roots\n")
    assert worker_constants(HostConfig.model_validate(host_config(upstream_roots=str(roots)))) == Prepare(
        upstream_roots="operator's roots\n",
        dns_upstreams=("10.0.0.53:53",),
        inside="192.0.2.2",
        allowed_addresses=("10.0.0.0/8",),
        host_addresses={"git.corp.example": ("10.0.0.5",)},
        limits={"idle": 60},
    )


def test_programs_trust_the_operator_s_roots_and_the_sandbox_s_own(tmp_path: Path) -> None:
    assert "operator's roots\nown\n" == made(tmp_path).ca_bundle("own\n")


def test_roots_that_cannot_be_had_are_no_start(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file"):
        worker_constants(HostConfig.model_validate(host_config(upstream_roots=str(tmp_path / "none"))))
    (tmp_path / "roots.pem").write_text("x" * (MAX_ROOTS + 1))
    with pytest.raises(ValueError, match="larger than"):
        made(tmp_path)


ANSWERS: dict[str, tuple[Callable[[], str], str]] = {
    "a refusal": (_raises(wire.RemoteError("invalid", "x")), "invalid"),
    "too large": (_raises(wire.RemoteError("too_large", "x")), "too_large"),
    "too large to be asked": (_raises(wire.FrameError()), "too_large"),
    "another refusal": (_raises(wire.RemoteError("exists", "x")), "unavailable"),
    "no connection": (_raises(ConnectionError()), "unavailable"),
    "no answer": (_raises(TimeoutError()), "unavailable"),
    "nothing": (str, "unavailable"),
    "no object": (lambda: "[]", "unavailable"),
    "no JSON": (lambda: "{", "unavailable"),
    "a deep text": (lambda: "[" * 100_000, "unavailable"),
}


@pytest.mark.parametrize("name", ANSWERS)
async def test_without_a_policy_of_the_compiler_there_is_none(tmp_path: Path, name: str) -> None:
    answer, code = ANSWERS[name]
    with pytest.raises(wire.RequestError) as refused:
        await made(tmp_path, answer).compile("{}", "5eed")
    assert code == refused.value.code


async def test_a_compiler_that_is_away_is_not_waited_for_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operator, "_PATIENCE_SECONDS", 0.0)
    made_here = made(tmp_path)
    made_here._daemons.up = False  # type: ignore[attr-defined]
    with pytest.raises(wire.RequestError, match="no policy is compiled now"):
        await made_here.compile("{}", "5eed")


@pytest.mark.parametrize(
    "changes",
    [
        {"cpu_nanos": 4 * 10**9 + 1},
        {"memory_bytes": 2**32 + 1},
        {"pids": 4097},
        {"disk_bytes": (1 << 34) + 1},
        {"disk_bytes": None},
        {"runtime": "runsc"},
    ],
)
def test_more_than_the_operator_allows_is_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    judge = made(tmp_path, runtimes=["runc"])
    judge.judge(launch_of(cpu_nanos=4 * 10**9, pids=4096), 1)
    with pytest.raises(wire.RequestError) as refused:
        judge.judge(launch_of(**changes), 1)
    assert "invalid" == refused.value.code


def test_the_number_of_sandboxes_is_the_operator_s(tmp_path: Path) -> None:
    with pytest.raises(wire.RequestError) as refused:
        made(tmp_path).judge(launch_of(), 2)
    assert "full" == refused.value.code


def test_without_limits_of_disks_a_launch_may_have_none(tmp_path: Path) -> None:
    maxima = host_config()["maxima"] | {"disk_bytes": None}
    made(tmp_path, disk_limits=False, maxima=maxima).judge(launch_of(disk_bytes=None), 0)
