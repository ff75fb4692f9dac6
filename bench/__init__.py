"""Benchmarks: the cost of Sallyport, each figure beside a named peer that was measured in the same run.

They use a complete server through its public interfaces, with the demo's internet. No figure causes a failure,
because hosts differ, and so does their load.
"""
