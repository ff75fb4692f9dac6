"""Containers: Docker, the OCI shim, and the parts of a container. The only package that imports docker."""
