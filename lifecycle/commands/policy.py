"""`sallyport policy check` and `policy explain`."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from gateway.dns.names import over_bounds
from gateway.translate import refusal_of_form
from lifecycle import stored_secrets
from lifecycle.commands.common import configured
from lifecycle.config.settings import Settings, SettingsError
from policy import cli


def add_arguments(parser: argparse.ArgumentParser, parents: Sequence[argparse.ArgumentParser]) -> None:
    """Add the commands `check` and `explain`; `parents` has options that each of them takes besides."""
    policies = parser.add_subparsers(dest="action", required=True)
    check = policies.add_parser("check", parents=parents, help="say whether a policy file is good")
    check.add_argument("file", type=Path, nargs="?", help="else the configured one")
    explain = policies.add_parser("explain", parents=parents, help="say what would happen to a request, and why")
    explain.add_argument("file", type=Path, nargs="?", help="else the configured one")
    explain.add_argument("--host", required=True)
    explain.add_argument("--method", default="GET")
    explain.add_argument("--path", default="/", help="with its query, if any")
    explain.add_argument("--scheme", choices=["https", "http", "postgres"], default="https")
    explain.add_argument("--database", help="of a session; for the scheme postgres")
    explain.add_argument("--port", type=int, help="else the scheme's")
    explain.add_argument("--policy", help="name of a policy in the file; else its default, or its only one")
    explain.add_argument("--address", help="what the host resolves to, to be judged too")


def run(options: argparse.Namespace) -> int:
    """Run the command; return its exit status."""
    if options.action == "check":
        return cli.check(_policy_file(options), stored_secrets.read(_server_of(options)))
    return _explain(options)


def _explain(options: argparse.Namespace) -> int:
    server = _server_of(options)
    return cli.explain(
        _policy_file(options),
        options.policy,
        options.host,
        options.port or {"https": 443, "http": 80, "postgres": 5432}[options.scheme],
        options.scheme,
        options.method,
        options.path,
        database=options.database,
        address=options.address,
        exceptions=() if server is None else server.get("sallyport.allowed_addresses"),
        mapped={} if server is None else server.get("sallyport.host_addresses"),
        form=refusal_of_form,
        bounds=over_bounds,
        stored=stored_secrets.read(server),
    )


def _policy_file(options: argparse.Namespace) -> Path:
    """Return the path of the policy file. For a named file no settings are read, unless `--config` is given."""
    if options.file is not None and options.config is None:
        return Path(options.file)
    found = configured(options)
    path: Path | None = options.file or found.policy_file
    if path is None:
        raise SettingsError("no policy file: name one, or set sallyport.policy_file")
    return path


def _server_of(options: argparse.Namespace) -> Settings | None:
    """Return the settings of the server that a policy is for; None if there are none and the file is named."""
    try:
        return configured(options)
    except SettingsError:
        if options.file is None or options.config is not None:
            raise
        return None
