"""The lifecycle API over HTTP: the application, its routes, authentication, errors and JSON models."""
