"""The properties and needs of each runtime: the only place that distinguishes runtimes. Pure.

The shim imports it for each container, so it imports nothing.
"""


class RuntimeProfile:
    """The properties of one runtime.

    Attributes:
        name: the name in settings, calls and launch plans.
        flags: options for each call of the real runtime.
        size_flag: the one of `flags` that can limit what a sandbox writes; empty if there is none.
        user_namespace: each container needs its own user namespace, because it shares the host's kernel.
        seccomp: each bundle must have a seccomp profile. If False, a profile that is there is checked too.
        isolation: execd may mount inside, because its capabilities apply only to the sandbox's own kernel.
        inner_limits: the sandbox's own kernel enforces the limit of processes.
        listeners: the runtime may have seccomp listeners; False if a freeze breaks them (`listeners`).
        kills_by_number: a deletion kills the processes whose numbers were recorded at creation, also if
            other processes have these numbers now (`shim.forget_ended`).
    """

    __slots__ = (
        "flags",
        "inner_limits",
        "isolation",
        "kills_by_number",
        "listeners",
        "name",
        "seccomp",
        "size_flag",
        "user_namespace",
    )

    def __init__(
        self,
        name: str,
        *,
        flags: tuple[str, ...],
        size_flag: str,
        user_namespace: bool,
        seccomp: bool,
        isolation: bool,
        inner_limits: bool,
        listeners: bool,
        kills_by_number: bool,
    ) -> None:
        self.name = name
        self.flags = flags
        self.size_flag = size_flag
        self.user_namespace = user_namespace
        self.seccomp = seccomp
        self.isolation = isolation
        self.inner_limits = inner_limits
        self.listeners = listeners
        self.kills_by_number = kills_by_number


RUNC = RuntimeProfile(
    "runc",
    flags=(),
    size_flag="",
    user_namespace=True,
    seccomp=True,
    isolation=False,
    inner_limits=False,
    listeners=True,
    kills_by_number=False,
)
RUNSC = RuntimeProfile(
    "runsc",
    # Stated even if they are the defaults, so that a changed default of runsc cannot weaken isolation.
    flags=(
        "--network=sandbox",
        "--net-raw=false",
        "--allow-packet-socket-write=false",
        "--host-uds=none",
        "--host-fifo=none",
        "--allow-flag-override=false",
        "--debug=false",
        "--strace=false",
        "--log-packets=false",
        "--profile=false",
        "--overlay2=root:self",
        "--file-access=exclusive",
        "--nvproxy=false",
        "--iouring=false",
    ),
    size_flag="--overlay2=root:self",
    user_namespace=False,
    seccomp=False,
    isolation=True,
    inner_limits=True,
    listeners=False,
    kills_by_number=True,
)
PROFILES = {profile.name: profile for profile in (RUNC, RUNSC)}
ISOLATED = " or ".join(profile.name for profile in PROFILES.values() if profile.isolation)
"""The runtimes with isolated sessions, for messages."""
