"""Containers: Docker, the OCI shim, and what a container consists of. The only package that imports docker."""
