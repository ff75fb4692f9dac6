"""Tests that switch off each defence, alone and together with all layers of its path, and judge at the far end.

A defence is switched off by a substitute for the function that implements it. The daemons of one Sallyport are started
from `daemon`, which replaces the functions named in `substitutes` and then runs the real main function. `state` writes
into a file of the run directory which substitutes are in force. The product contains none of this.
"""
