"""Reads the operator's policy file, and the presets that it can extend.

- At most `yaml_tree.MAX_BYTES` are read.
- Every error, also for an unreadable file, is a `PolicyError` with file, line and column. It has all problems of the
  file, not only the first.
- The presets are files of this package (`presets/*.yaml`), in the language of the operator's file. Their names and the
  ids of their rules begin with `preset/`. The file of a service with regions has the hosts of one; it gives a preset
  for each, such as `preset/aws/eu-west-1`.
"""

from dataclasses import replace
from functools import cache
from pathlib import Path
from types import MappingProxyType

from policy.aws_hosts import REGIONS
from policy.document import PRESET, PolicyDocument, PolicySource, Presets
from policy.names import HostPattern
from policy.problems import Problems
from policy.rules import Rule
from policy.schema import read_document
from policy.yaml_tree import MAX_BYTES, PolicyError, parse

__all__ = ["PolicyDocument", "PolicyError", "load", "load_text", "presets"]

_PRESETS = Path(__file__).with_name("presets")
_REGIONAL = {"aws": REGIONS}
"""Presets with regions. The first is that of the file; it is a label of each host."""


def load(path: Path | str, origin: str | None = None) -> PolicyDocument:
    """Return the document of a file. `origin` is its name in errors.

    Raises:
        PolicyError: the file cannot be read or is invalid.
    """
    name = origin if origin is not None else str(path)
    try:
        with Path(path).open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise PolicyError(name, 1, 1, f"cannot be read: {error.strerror or 'unknown error'}") from error
    return load_text(data, name)


def load_text(text: str | bytes, origin: str = "(text)") -> PolicyDocument:
    """Return the document of a text.

    Raises:
        PolicyError: the text is invalid.
    """
    problems = Problems()
    return read_document(parse(text, origin, problems), origin, problems, presets())


@cache
def presets() -> Presets:
    """Return the presets by their names.

    Raises:
        PolicyError, OSError: a file of the installation is missing or invalid.
    """
    found: dict[str, PolicySource] = {}
    for path in sorted(_PRESETS.glob("*.yaml")):
        problems = Problems()
        document = read_document(parse(path.read_bytes(), path.name, problems), path.name, problems)
        source = document.policies[path.stem]
        for region in _REGIONAL.get(path.stem, ("",)):
            name = f"{PRESET}{path.stem}/{region}".removesuffix("/")
            rules = source.rules if not region else tuple(_moved(rule, path.stem, region) for rule in source.rules)
            found[name] = replace(source, name=name, rules=tuple(_named(rule, name) for rule in rules))
    return MappingProxyType(found)


def _moved(rule: Rule, service: str, region: str) -> Rule:
    """Return a rule for the hosts of another region."""
    written = _REGIONAL[service][0]
    hosts = (".".join(region if one == written else one for one in host.text.split(".")) for host in rule.hosts)
    return replace(rule, hosts=tuple(map(HostPattern, hosts)))


def _named(rule: Rule, preset: str) -> Rule:
    """Return a rule of a preset with the id that it has in policies."""
    ident = f"{preset}/{rule.id.partition('/')[2]}"
    injections = tuple(replace(plan, binding=ident) for plan in rule.injections)
    substitutions = tuple(replace(plan, binding=ident) for plan in rule.substitutions)
    return replace(rule, id=ident, injections=injections, substitutions=substitutions)
