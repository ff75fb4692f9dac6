"""The product's own table of attempts, under the name that the demo and the tests know."""

from lifecycle.posture.attempts import ATTEMPTS, Attempt, Evidence, FarEnd, arrived

__all__ = ["ATTEMPTS", "Attempt", "Evidence", "FarEnd", "arrived"]
