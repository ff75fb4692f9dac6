"""The processes of Sallyport: start, adoption, limits, output, liveness and end."""
