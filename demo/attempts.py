"""The product's own table of attempts, under the name that the demo and the tests know."""

from lifecycle.posture.attempts import (
    ATTEMPTS,
    Attempt,
    Control,
    Evidence,
    FarEnd,
    ProbeError,
    Report,
    arrived,
    refused,
    report,
)

__all__ = [
    "ATTEMPTS",
    "Attempt",
    "Control",
    "Evidence",
    "FarEnd",
    "ProbeError",
    "Report",
    "arrived",
    "refused",
    "report",
]
