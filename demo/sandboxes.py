"""A sandbox of the demo: its work, the attacks from inside it, the death of its worker, its removal."""

import contextlib
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from opensandbox.exceptions import SandboxException
from opensandbox.models.execd import RunCommandOpts

from demo.table import Row
from lifecycle.posture import ways_out
from lifecycle.posture.attempts import Attempt, Control, ProbeError, Report, arrived, refused, report
from lifecycle.posture.capture import Capture
from testbed import collect
from testbed.far_end import FarEndWatch, probe_environment, sandbox_targets
from testbed.internet import ADDRESSES, API, ATTACKER, GIT, INDEX, STATUS, Internet
from testbed.leaks import forms_of, leaks_in
from testbed.privileged import Ended, PrivilegedContainer
from testbed.stack import EMPTY_IMAGE, Stack

REPLACEMENT_SECONDS = 2.0
REPLACEMENT_REQUESTS = 10
"""If a busy host needs more than `REPLACEMENT_SECONDS` for this number of requests, their time is the limit."""
CUT_OFF_SECONDS = 10.0
_PATIENCE_SECONDS = 60.0
_HANDED_OUT = "nothing arrives"

Controls = dict[str, dict[str, int]]
"""For each runtime and probe, how much arrived from a place without a gateway."""

_PYTHON_REQUEST = """
import json, sys, urllib.request
kind = sys.argv[1]
if kind == "urllib":
    body = urllib.request.urlopen("https://api.bank.example/v1/accounts", timeout=10).read().decode()
else:
    import requests
    body = requests.post("https://api.bank.example/v1/payments", json={"amount": 1}, timeout=10).text
print(json.loads(body)["method"])
"""


@dataclass(frozen=True, slots=True)
class Secrets:
    """The secrets in the vault: two `user:password` pairs and a bearer token."""

    git: str
    index: str
    api: str

    def __repr__(self) -> str:
        return "Secrets(...)"

    @property
    def values(self) -> list[str]:
        """Every string that must not be in a sandbox: the secrets, and the passwords also without their user."""
        passwords = [pair.split(":", 1)[1] for pair in (self.git, self.index)]
        return [self.git, self.index, self.api, *passwords]


class DemoSandbox:
    """One sandbox, made with the unmodified SDK."""

    def __init__(self, stack: Stack, runtime: str, secrets: Secrets) -> None:
        self._stack, self.runtime, self._secrets = stack, runtime, secrets
        self._created = time.time()
        self._sandbox = stack.create(runtime)
        self.id = str(self._sandbox.id)
        self._answers: list[bytes] = []
        for module in (ways_out, collect):
            source = Path(str(module.__file__)).read_text()
            self._sandbox.files.write_file(f"/tmp/{Path(str(module.__file__)).name}", source)
        self._sandbox.files.write_file("/tmp/request.py", _PYTHON_REQUEST)

    def run(self, command: str, **environment: str) -> tuple[int | None, str]:
        """Run a shell command inside; return its exit code and its output."""
        options = RunCommandOpts(timeout=timedelta(seconds=120), envs=environment or None)
        execution = self._sandbox.commands.run(command, opts=options)
        printed = "".join(message.text for message in (*execution.logs.stdout, *execution.logs.stderr))
        self._answers.append(printed.encode())
        return execution.exit_code, printed

    def work(self) -> list[Row]:
        """Do the job: unmodified tools with private services; none of the tools has a secret."""
        jobs = (
            ("git clone", f"git clone -q https://{GIT}/ledger.git /tmp/ledger && cat /tmp/ledger/ledger.txt", "ledger"),
            (
                "pip install",
                f"pip install -q --disable-pip-version-check --target /tmp/site --index-url https://{INDEX}/simple/ "
                "bank-tools && PYTHONPATH=/tmp/site python3 -c 'import bank_tools; print(bank_tools.ANSWER)'",
                "42",
            ),
            ("curl, the API", f"curl -sS -i --max-time 10 https://{API}/v1/balance | tee /tmp/answer", "200"),
            ("urllib, the API", "python3 /tmp/request.py urllib", "GET"),
            ("requests, the API", "python3 /tmp/request.py requests", "POST"),
            ("curl, a host without secrets", f"curl -sS --max-time 10 https://{STATUS}/", STATUS),
        )
        self.run("rm -rf /tmp/ledger /tmp/site")  # so that the job can be repeated
        rows = []
        for title, command, expected in jobs:
            code, printed = self.run(command)
            done = code == 0 and expected in printed
            observed = "done" if done else f"exit {code}: {printed.strip()[-200:]}"
            rows.append(Row(self.runtime, title, "works", observed, done))
        code, printed = self.run(f"curl -sS --max-time 10 https://{API}/admin")
        named = "api" in printed or "default" in printed
        rows.append(Row(self.runtime, "curl, a path no rule allows", "a readable 403", printed.strip()[:60], named))
        return rows

    def attempt(self, probe: str) -> Report:
        """Run one probe in the workload; return its report.

        Raises:
            ProbeError: it did not run to its end.
        """
        environment = probe_environment(sandbox_targets())
        return report(probe, *self.run(f"python3 /tmp/ways_out.py one {probe}", PROBE_TARGETS=environment))

    def attack(self, attempt: Attempt, watch: FarEndWatch, controls: Controls) -> Row:
        """Try one way out from the workload."""
        return self._judged(attempt, watch, controls, lambda: self.attempt(attempt.probe))

    def privileged_attacks(self, attempts: tuple[Attempt, ...], watch: FarEndWatch, controls: Controls) -> list[Row]:
        """Try the ways out again, from a privileged container in this sandbox's network namespace.

        Attempts for which the sandbox is cut off are left to `noticed_attack`, because the sandbox does not survive
        them.
        """
        netns = self._stack.netns(self.id, "sbx")
        with self.address_restored(), PrivilegedContainer(netns, sandbox_targets(), "192.0.2.1") as container:
            return [
                self._judged(
                    attempt,
                    watch,
                    controls,
                    lambda attempt=attempt: container.attempt(attempt.probe),  # type: ignore[misc]
                    privileged=True,
                )
                for attempt in attempts
                if attempt.privileged and not attempt.noticed
            ]

    def noticed_attack(self, attempt: Attempt, watch: FarEndWatch, controls: Controls) -> list[Row]:
        """Try an attack that changes the namespace, from a privileged container: the sandbox must be cut off.

        Nothing may arrive at the far end.

        The container can end with its sandbox before the probe does; the alarm then shows that the attack was tried.
        """
        netns = self._stack.netns(self.id, "sbx")
        place = f"{self.runtime}, privileged"
        with self.address_restored(), PrivilegedContainer(netns, sandbox_targets(), "192.0.2.1") as container:

            def probe() -> Report:
                try:
                    return container.attempt(attempt.probe)
                except Ended:
                    return {}

            tried = self._judged(attempt, watch, controls, probe, privileged=True)
        began = time.monotonic()
        alarm = ""
        while not alarm and time.monotonic() - began < CUT_OFF_SECONDS:
            time.sleep(0.1)
            alarm = str(self._stack.inspect(self.id).alarm)
        recorded = [r for r in self._stack.audit_records() if r["kind"] == "alarm" and r.get("sandbox") == self.id]
        good = bool(alarm) and bool(recorded)
        observed = f"after {time.monotonic() - began:.1f} s: {alarm}"[:160] if good else "no alarm"
        return [tried, Row(place, f"{attempt.title}: noticed", "alarm, cut off", observed, good)]

    @contextmanager
    def address_restored(self) -> Iterator[None]:
        """Restore the address in the host-side view of a runsc sandbox for this time (runsc removes it)."""
        netns = self._stack.netns(self.id, "sbx")
        added = _nsenter(netns, "addr", "add", "192.0.2.2/30", "dev", "eth0")
        _nsenter(netns, "route", "add", "default", "via", "192.0.2.1", "dev", "eth0")
        try:
            yield
        finally:
            if added:
                _nsenter(netns, "addr", "del", "192.0.2.2/30", "dev", "eth0")

    def _judged(
        self,
        attempt: Attempt,
        watch: FarEndWatch,
        controls: Controls,
        probe: Callable[[], Report],
        *,
        privileged: bool = False,
    ) -> Row:
        """Judge by what arrived, if the probe ran to its end.

        The result of its control, and whether the sandbox's kernel permits its start, must agree with the table of
        attempts.
        """
        kernel = "runc" if privileged else self.runtime  # the privileged container runs on the host's kernel
        control = controls[kernel][attempt.probe]
        can_arrive = attempt.control(kernel) is not Control.ABSENT
        can_begin = privileged or attempt.control(kernel) is Control.WORKLOAD
        mark, seen, problem = watch.mark(), Report(), ""
        try:
            seen = probe()
        except ProbeError as error:
            problem = f"; {error}"
        if not problem and refused(seen) == can_begin:
            problem = f"; probe {attempt.probe} saw {seen}"
        count = arrived(attempt.far_end, watch.since(mark, seen))
        shown = str(control) if can_arrive else f"{control}, the kernel has none"
        observed = f"{count} of {attempt.far_end.value}; control: {shown}{problem}"
        place = f"{self.runtime}, privileged" if privileged else self.runtime
        good = count == 0 and not problem and can_arrive == (control > 0)
        return Row(place, attempt.title, _HANDED_OUT, observed, good)

    def leak_search(self) -> list[Row]:
        """Search everything the sandbox can read, and all answers that it received, for any form of a secret."""
        planted = f"planted-{self.id[-12:]}-in-environment", f"planted-{self.id[-12:]}-in-file"
        self.run(
            f"printf %s {planted[1]} >/tmp/planted; sleep 120 </dev/null >/dev/null 2>&1 & "
            f"sleep 0.2; python3 /tmp/collect.py /tmp/collection {self._created - 5:.0f}; kill $!",
            PLANTED=planted[0],
        )
        collection = self._sandbox.files.read_bytes("/tmp/collection")
        everything = [collection, *self._answers]
        found = sum(leaks_in(everything, forms_of(value)) for value in self._secrets.values)
        control = sum(1 for value in planted if leaks_in([collection], forms_of(value)))
        observed = f"{found} in {len(collection) >> 10} KiB and {len(self._answers)} answers; control: {control} of 2"
        title = "secrets in env, files, /proc, answers"
        return [Row(self.runtime, title, "none", observed, found == 0 and control == 2)]

    def kill_worker(self, internet: Internet) -> Row:
        """Kill the gateway worker: nothing may escape, and the same policy must be served again in time."""
        pid = self._stack.worker_pid(self.id)
        with Capture(internet.path(internet.net), "net0") as wire:
            self.run(
                f"nohup sh -c 'for i in $(seq 40); do curl -sk --max-time 1 https://{ADDRESSES[ATTACKER]}/; "
                "sleep 0.05; done' >/dev/null 2>&1 &"
            )
            ask = f"curl -sS --max-time 2 https://{API}/v1/balance"
            began = time.monotonic()
            self.run(ask)
            bound = max(REPLACEMENT_SECONDS, REPLACEMENT_REQUESTS * (time.monotonic() - began))
            mark = wire.mark()
            subprocess.run(["kill", "-KILL", str(pid)], check=True)
            killed = time.monotonic()
            served = None
            while served is None and time.monotonic() - killed < _PATIENCE_SECONDS:
                with contextlib.suppress(SandboxException):  # the ingress goes through the worker, too
                    code, printed = self.run(ask)
                    if code == 0 and '"method"' in printed:
                        served = time.monotonic() - killed
            escaped = sum(1 for frame in wire.since(mark) if frame.destination == ADDRESSES[ATTACKER])
        replaced = self._stack.worker_pid(self.id) != pid
        good = served is not None and served <= bound and escaped == 0 and replaced
        when = "never" if served is None else f"after {served:.2f} s"
        observed = f"{escaped} frames at the attacker; policy and trusted CA back {when}"
        return Row(self.runtime, "kill -9 the gateway worker", "closed, back within 2 s", observed, good)

    def close(self) -> None:
        """Delete the sandbox."""
        self._sandbox.kill()
        self._sandbox.close()

    def delete(self) -> Row:
        """Delete the sandbox and search for its remains on this host."""
        traces = self._stack.traces(self.id)
        self.close()
        left = traces.remaining()
        observed = "; ".join(left) if left else f"nothing remains ({traces.described})"
        return Row(self.runtime, "delete the sandbox", "nothing remains", observed, not left)


def _nsenter(netns: str, *arguments: str) -> bool:
    done = subprocess.run(["nsenter", f"--net={netns}", "ip", *arguments], capture_output=True, check=False)
    return done.returncode == 0


def empty_image_works(stack: Stack, runtime: str) -> Row:
    """Check execd in an image without any file: it starts, and accepts and returns files."""
    title, content = "execd in an empty image", "bytes in an empty image"
    sandbox: Any = None
    try:
        sandbox = stack.create(runtime, image=EMPTY_IMAGE, policy="deny-all")
        sandbox.files.write_file("/data/file", content)
        good = sandbox.files.read_file("/data/file") == content
        return Row(runtime, title, "works", "a file written and read back" if good else "other bytes", good)
    except Exception as error:  # noqa: BLE001 - whatever the SDK raises is this row's outcome
        return Row(runtime, title, "works", f"{type(error).__name__}: {error}"[:200], False)
    finally:
        if sandbox is not None:
            sandbox.kill()
            sandbox.close()
