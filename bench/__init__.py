"""Benchmarks: what Sallyport costs, each figure beside a named peer that was measured in the same run.

They drive a whole server through its public faces, next to the demo's internet. No figure here fails anything: machines
differ, and so does what else runs on them.
"""
