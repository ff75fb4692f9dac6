"""Sandboxes as the API's server knows them: creation, reading, removal, expiry and the state database."""
