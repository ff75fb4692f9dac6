"""The images of this host: the list of those that may be started, and the ways by which an image gets into it."""
