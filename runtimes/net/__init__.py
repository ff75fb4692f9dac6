"""Network namespaces, links and rules of a slot. The only package that imports pyroute2."""
