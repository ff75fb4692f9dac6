"""The chaos run: kill what Sallyport is made of, under load, and judge what happened by wire and log.

`python -m demo.chaos` (or `./run chaos`). The judge is pure; everything else collects evidence for it.
"""
