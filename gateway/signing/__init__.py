"""Signatures of requests with leased secrets."""
