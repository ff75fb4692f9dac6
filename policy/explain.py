"""Whether a gateway would send one request, as far as policy and the request alone can tell. Pure.

The same functions as the gateway asks, in its order: name, flow, then the request on an inspected flow. What depends on
more than that (what a name resolves to, budgets, the vault) is said as a condition of the answer, never left out: the
strongest answer is `Sent` with its conditions.
"""
