"""`sallyport doctor --probe`, a check of this machine's isolation: real attempts to get out, judged at the far end."""
