"""The OCI shim without the checks that are off.

It is started like the real shim: `python -IS`, without site-packages.
"""

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from runtimes.engine import shim

words = sys.argv[1:]
state = Path(words[2]).parent / "layers.json"
off = json.loads(state.read_text())["off"] if state.exists() else []

if "shim's plan check" in off:
    real_prepare = shim.prepare

    def prepare(kind: str, plans: str, rest: list[str]) -> int | None:
        """Let a container without a plan run as Docker made it, if its bundle is as restricted as a sandbox's."""
        container, bundle = shim.create_target(rest)
        if os.path.exists(os.path.join(plans, f"{container}.json")):
            return real_prepare(kind, plans, rest)
        config = shim.read_json(os.path.join(bundle, "config.json"))
        binds = {one["destination"]: [one.get("source"), "ro" in one.get("options", ())] for one in config["mounts"]}
        own = "/proc/self/ns/net"
        plan = {"isolation": False, "binds": binds, "volumes": {}, "room": None}
        plan |= {"netns": own, "netns_inode": os.stat(own).st_ino}
        if "shim's bundle check" not in off:
            shim.harden(config, plan, kind)
        return None

    shim.prepare = prepare

if "shim's bundle check" in off:
    shim.check_process = lambda _process, **_: None
    shim.check_seccomp = lambda _seccomp: None
    shim.check_devices = lambda _linux: None
    shim.check_mounts = lambda _mounts, _binds, _volumes: None

sys.exit(shim.main(words))
