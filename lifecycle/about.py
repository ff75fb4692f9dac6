"""The product's name and release. `pyproject.toml` contains the same."""

PRODUCT = "Sallyport"
VERSION = "0.1.0"
API_VERSION = "1.1.1"
"""The release of the OpenSandbox API that the server implements. Clients compare it."""
CONTRACT = f"OpenSandbox {API_VERSION}"
