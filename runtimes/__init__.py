"""Isolation: slots (namespaces without a way out), containers in them, and the root daemon that owns both.

- Nothing here decides what a sandbox can reach; this package ensures that it can reach only its gateway.
- It imports nothing of Sallyport but `wire`; the other daemons are started through their entry points.
- Only `netns` uses pyroute2, only `docker` uses the docker package.
"""
