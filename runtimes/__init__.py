"""Isolation: slots (namespaces without a way out), containers in them, and the root daemon that owns both.

- Nothing here decides what a sandbox may reach; this package makes sure that it can reach its gateway only.
- It imports nothing of Sallyport but `wire`; the other daemons are started through their entry points.
- Only `netns` uses pyroute2, only `docker` uses the docker package.
"""
