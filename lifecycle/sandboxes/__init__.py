"""The server's management of sandboxes: creation, reading, removal, expiry and the state database."""
