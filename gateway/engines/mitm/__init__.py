"""The engine on mitmproxy as a library. Only this package imports mitmproxy. Its entry is `engine.FullEngine`."""
