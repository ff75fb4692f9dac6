"""The command `sallyport`. Each subcommand is a call into the package that implements it.

sallyport serve | doctor [--probe]
sallyport init-config [--output FILE]
sallyport policy check [FILE] | policy explain [FILE] --host HOST [--method M] [--path P] [--policy NAME]
sallyport vault init | put | list | rotate | delete | reset | revoke-all | freeze | unfreeze | rekey
sallyport image add SOURCE [--name NAME] | alias NAME ALIAS | list | show NAME | remove NAME
sallyport volume list | remove NAME
sallyport audit tail | verify [--anchor FILE] | anchor [--output FILE] [DIRECTORY]

`--config FILE` is allowed before and after a command. Without it, `serve` searches for settings as `settings.read`
describes. The other commands use the settings of the running server, if there is one (`lifecycle.running`).
"""

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import audit.cli
import policy.cli
import vault.cli
from gateway.dns.names import over_bounds
from gateway.translate import refusal_of_form
from lifecycle import about, console, doctor, images, running, stored_secrets, volumes
from lifecycle.config import launch, master_key, reference, settings
from lifecycle.config.settings import Settings, SettingsError
from runtimes.process import api_listener
from runtimes.process.bounded_log import ANCHORS_NAME
from vault.keyring import MasterKeyError

OK, FAILED, WRONG = 0, 1, 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return its exit status."""
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="sallyport: %(message)s")
    return console.guarded(lambda: _main(arguments))


def _main(arguments: Sequence[str] | None) -> int:
    options = parser().parse_args(arguments)
    try:
        return _run(options)
    except SettingsError as error:
        print(f"sallyport: {error}", file=sys.stderr)
        return WRONG


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    top = argparse.ArgumentParser(prog="sallyport", allow_abbrev=False)
    about_config = f"settings (TOML); else {settings.CONFIG_PATH}, else ~/.sandbox.toml"
    version = f"{about.PRODUCT.lower()} {about.VERSION} (API: {about.CONTRACT})"
    top.add_argument("--version", action="version", version=version)
    top.add_argument("--config", type=Path, help=about_config)
    top.add_argument("--defaults", type=Path, help="settings that those of --config win over, key by key")
    after = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    after.add_argument("--config", type=Path, default=argparse.SUPPRESS, help=about_config)
    commands = top.add_subparsers(dest="command", required=True)
    serve = commands.add_parser("serve", parents=[after], help="run the server and everything it needs (as root)")
    serve.add_argument("--write-only", action="store_true", help="write the daemons' configuration and stop there")
    check_host = commands.add_parser("doctor", parents=[after], help="say what this host lacks and how to provide it")
    check_host.add_argument("--probe", action="store_true", help="start sandboxes here and try to get out of them")
    init = commands.add_parser("init-config", parents=[after], help="print a settings file with every key as a comment")
    init.add_argument("--output", type=Path, help="write it to this new file instead")
    policies = commands.add_parser("policy", parents=[after], help="check and explain policy files").add_subparsers(
        dest="action", required=True
    )
    check = policies.add_parser("check", parents=[after], help="say whether a policy file is good")
    check.add_argument("file", type=Path, nargs="?", help="else the configured one")
    explain = policies.add_parser("explain", parents=[after], help="say what would happen to a request, and why")
    explain.add_argument("file", type=Path, nargs="?", help="else the configured one")
    explain.add_argument("--host", required=True)
    explain.add_argument("--method", default="GET")
    explain.add_argument("--path", default="/", help="with its query, if any")
    explain.add_argument("--scheme", choices=["https", "http", "postgres"], default="https")
    explain.add_argument("--database", help="of a session; for the scheme postgres")
    explain.add_argument("--port", type=int, help="else the scheme's")
    explain.add_argument("--policy", help="name of a policy in the file; else its default, or its only one")
    explain.add_argument("--address", help="what the host resolves to, to be judged too")
    vault.cli.add_commands(commands.add_parser("vault", parents=[after], help="manage stored secrets"), [after])
    images.add_commands(commands.add_parser("image", parents=[after], help="manage the images of sandboxes"), [after])
    volumes.add_commands(commands.add_parser("volume", parents=[after], help="manage named volumes"), [after])
    log = commands.add_parser("audit", parents=[after], help="read and verify the audit log").add_subparsers(
        dest="action", required=True
    )
    tail = log.add_parser("tail", parents=[after], help="print records")
    tail.add_argument("--denied", action="store_true", help="denials only")
    tail.add_argument("--sandbox", help="of one sandbox only")
    tail.add_argument("--follow", "-f", action="store_true")
    tail.add_argument("--output", choices=["text", "json", "ecs"], default="text")
    verify = log.add_parser("verify", parents=[after], help="check that the log is what was written")
    verify.add_argument("--key", type=Path, help="public key to trust, else the log's own")
    verify.add_argument(
        "--anchor", type=Path, action="append", default=[], help="compare with the anchors in this file"
    )
    anchor = log.add_parser(
        "anchor", parents=[after], help="print what to keep elsewhere, so that a rewritten log is found"
    )
    anchor.add_argument("--key", type=Path, help="public key to trust, else the log's own")
    anchor.add_argument("--output", type=Path, help="append it to this file instead")
    for command in (tail, verify, anchor):
        command.add_argument("directory", type=Path, nargs="?", help="of the log or a copy; else the configured one")
    return top


def _run(options: argparse.Namespace) -> int:
    match options.command, getattr(options, "action", None):
        case "serve", _:
            return _serve(_given(options), write_only=options.write_only)
        case "doctor", _:
            configured = _configured(options)
            return _probe(configured) if options.probe else _doctor(configured)
        case "init-config", _:
            return _init_config(options.output)
        case "policy", "check":
            return policy.cli.check(_policy_file(options), stored_secrets.read(_server_of(options)))
        case "policy", "explain":
            return _explain(options)
        case "vault", _:
            return _vault(options)
        case "image", _:
            return images.run(options, _configured(options).run_dir / "hostd.sock")
        case "volume", _:
            return volumes.run(options, _configured(options).run_dir / "hostd.sock")
        case "audit", "tail":
            return audit.cli.tail(
                _log_directory(options),
                denied=options.denied,
                sandbox=options.sandbox,
                follow=options.follow,
                output=options.output,
            )
        case "audit", "anchor":
            return audit.cli.anchor(
                _log_directory(options), key=options.key, kept=_kept_anchors(options), output=options.output
            )
        case _:
            return audit.cli.verify(
                _log_directory(options), key=options.key, anchors=options.anchor, kept=_kept_anchors(options)
            )


def _given(options: argparse.Namespace) -> Settings:
    return settings.read(options.config, settings.environment(), options.defaults)


def _configured(options: argparse.Namespace) -> Settings:
    """Return the settings of the named file, else those of the running server, else those that `serve` would use."""
    configured = _given(options)
    named = options.config is not None or settings.CONFIG_PATH in settings.environment()
    return configured if named else running.settings_of(configured)


def _serve(configured: Settings, *, write_only: bool) -> int:
    if os.geteuid() != 0 and not write_only:
        print("sallyport: cannot run: not root; run: sallyport doctor", file=sys.stderr)
        return FAILED
    for remark in configured.remarks:
        print(f"sallyport: {remark}", file=sys.stderr)
    if configured.policy_file is None:
        print("sallyport: no sallyport.policy_file: sandboxes without a networkPolicy get deny-all", file=sys.stderr)
    elif policy.cli.check(configured.policy_file) != 0:
        return WRONG
    if not write_only and (problem := launch.database_problem(configured)):
        print(f"sallyport: cannot run: {problem}; run: sallyport doctor", file=sys.stderr)
        return FAILED
    try:
        if not write_only:  # The programs that this process executes inherit it.
            notes = configured.run_dir / "config"
            api_listener.hand_over(api_listener.obtain(configured.host, configured.port, notes))
        keys = launch.api_keys(configured)
        master_key.prepare(configured)
        host = launch.write_all(configured, keys)
        if not write_only:
            running.note(configured)
    except (OSError, MasterKeyError) as error:
        print(f"sallyport: cannot run: {console.reason(error)}; run: sallyport doctor", file=sys.stderr)
        return FAILED
    if configured.insecure:
        print(f"sallyport: {settings.INSECURE}=YES: no API key is asked for", file=sys.stderr)
    print(f"sallyport: address: {launch.address(configured)}", file=sys.stderr)
    print(f"sallyport: policy file: {configured.policy_file or 'none'}", file=sys.stderr)
    for line in launch.exports(configured):
        print(line, flush=True)
    if write_only:
        print(host)
        return OK
    python = str(configured.get("sallyport.python") or sys.executable)
    os.chdir(doctor.PROJECT)  # The modules that `-m` finds must not depend on the operator's working directory.
    console.flush()
    try:
        os.execv(python, [python, "-m", "runtimes.process.watchdog", str(host)])  # noqa: S606 - no shell is meant
    except OSError as error:
        print(f"sallyport: cannot run: {python}: {error.strerror}; run: sallyport doctor", file=sys.stderr)
    return FAILED


def _vault(options: argparse.Namespace) -> int:
    configured = _configured(options)
    if options.action == "rekey" and master_key.differs(configured, running.settings_of(configured)):
        print(
            "sallyport: the running server has other settings of the master key: start it again with these first",
            file=sys.stderr,
        )
        return FAILED
    owner = launch.uids(configured)["vaultd"]
    socket, path = configured.run_dir / "vault.sock", configured.master_key_file
    if options.action not in ("init", "rekey"):
        return vault.cli.run(options, vault.cli.VaultPlaces(socket, path, (owner, owner)))
    if options.action == "init":
        master_key.make_directories(configured)
    with master_key.wrapping_of(configured) as wrapping:
        return vault.cli.run(options, vault.cli.VaultPlaces(socket, path, (owner, owner), wrapping))


def _init_config(output: Path | None) -> int:
    if output is None:
        print(reference.toml(), end="")
        return OK
    try:
        with output.open("x", encoding="utf-8") as file:
            file.write(reference.toml())
    except FileExistsError:
        print(f"sallyport: {output} exists and is not replaced; name another file with --output", file=sys.stderr)
        return FAILED
    except OSError as error:
        print(f"sallyport: {output}: {error.strerror}", file=sys.stderr)
        return FAILED
    return OK


def _doctor(configured: Settings) -> int:
    if doctor.needs_root():
        print("sallyport: not run by root: most checks cannot be made", file=sys.stderr)
    findings = doctor.diagnose(configured)
    for finding in findings:
        print(finding.line())
    return OK if all(finding.ok for finding in findings) else FAILED


def _probe(configured: Settings) -> int:
    if doctor.needs_root():
        print("sallyport: cannot probe: not root", file=sys.stderr)
        return FAILED
    from lifecycle.posture.probe import probe  # This imports an HTTP client that no other command needs.

    held = probe(configured, lambda line: print(line, flush=True))
    print("posture: every way held" if held else "posture: NOT every way is known to hold")
    return OK if held else FAILED


def _policy_file(options: argparse.Namespace) -> Path:
    """Return the path of the policy file. For a named file no settings are read, unless `--config` is given."""
    if options.file is not None and options.config is None:
        return Path(options.file)
    configured = _configured(options)
    path: Path | None = options.file or configured.policy_file
    if path is None:
        raise SettingsError("no policy file: name one, or set sallyport.policy_file")
    return path


def _log_directory(options: argparse.Namespace) -> Path:
    if options.directory is not None and options.config is None:
        return Path(options.directory)
    configured = _configured(options)
    return Path(options.directory or configured.state_dir / "audit")


def _kept_anchors(options: argparse.Namespace) -> list[Path]:
    """Return the files with hostd's anchors of the configured log. For another log there are none."""
    if options.directory is not None:
        return []
    path = _configured(options).state_dir / "hostd" / ANCHORS_NAME
    return [path.with_name(f"{path.name}.old"), path]


def _server_of(options: argparse.Namespace) -> Settings | None:
    """Return the settings of the server that a policy is for; None if there are none and the file is named."""
    try:
        return _configured(options)
    except SettingsError:
        if options.file is None or options.config is not None:
            raise
        return None


def _explain(options: argparse.Namespace) -> int:
    configured = _server_of(options)
    return policy.cli.explain(
        _policy_file(options),
        options.policy,
        options.host,
        options.port or {"https": 443, "http": 80, "postgres": 5432}[options.scheme],
        options.scheme,
        options.method,
        options.path,
        database=options.database,
        address=options.address,
        exceptions=() if configured is None else configured.get("sallyport.allowed_addresses"),
        mapped={} if configured is None else configured.get("sallyport.host_addresses"),
        form=refusal_of_form,
        bounds=over_bounds,
        stored=stored_secrets.read(configured),
    )


if __name__ == "__main__":
    raise SystemExit(main())
