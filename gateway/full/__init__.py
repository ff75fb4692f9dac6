"""Inspection with mitmproxy as a library. The only package that imports it; enter through `engine.FullEngine`."""
