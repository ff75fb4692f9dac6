"""The product's own capture, under the name that the demo and the tests know."""

from lifecycle.posture.capture import Capture, Frame, parse

__all__ = ["Capture", "Frame", "parse"]
