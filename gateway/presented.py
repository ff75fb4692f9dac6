"""The client certificate that a request's connection presents to the server.

- A connection that presented a certificate carries only requests with the same plan and the same certificate. A request
  without a client certificate never uses such a connection.
- A value that is no client certificate, or is not valid at this time, is refused with the reason.

Pure.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime
from typing import TypeGuard

from gateway.effects import SecretRefused
from policy.injection import InjectionPlan, SecretPlan
from vault.client_certificate import CertificateError, ClientCertificate, parse
from vault.secret import Secret


@dataclass(frozen=True, slots=True)
class Presented:
    """A client certificate with the plan that permits it. Equal ones are the same certificate under the same plan."""

    plan: InjectionPlan
    fingerprint: bytes
    certificate: ClientCertificate = field(compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class KeptCertificate:
    """The last certificate of a flow, kept with what it was read from."""

    value: Secret
    presented: Presented


def presents(plan: SecretPlan) -> TypeGuard[InjectionPlan]:
    """Whether the secret of `plan` is presented in the TLS handshake."""
    return isinstance(plan, InjectionPlan) and plan.handshake


def presented_plans(plans: Iterable[SecretPlan]) -> frozenset[SecretPlan]:
    """Return those of `plans` whose secret is presented in the TLS handshake."""
    return frozenset(plan for plan in plans if presents(plan))


def read(plan: InjectionPlan, value: Secret, now: datetime, kept: KeptCertificate | None) -> KeptCertificate:
    """Return the certificate to present for `plan` at this time. `kept` is used again if it is of the same value.

    Raises:
        SecretRefused: the value is no client certificate that can be used now.
    """
    if kept is None or kept.presented.plan != plan or kept.value is not value:
        try:
            certificate = parse(value.reveal())
        except CertificateError as error:
            raise SecretRefused(f"the value of the secret is no client certificate: {error}") from None
        kept = KeptCertificate(value, Presented(plan, certificate.fingerprint, certificate))
    if (problem := kept.presented.certificate.expiry_problem(now)) is not None:
        raise SecretRefused(problem)
    return kept
