"""What this product is called and which release of it this is; `pyproject.toml` says the same."""

PRODUCT = "Sallyport"
VERSION = "0.1.0"
API_VERSION = "1.1.1"
"""The release of the OpenSandbox API that the server speaks; clients compare it."""
CONTRACT = f"OpenSandbox {API_VERSION}"
