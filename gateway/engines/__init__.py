"""Engines that inspect HTTP, and the port between them and the worker."""
