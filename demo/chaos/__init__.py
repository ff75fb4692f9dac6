"""The chaos run: kills the processes of Sallyport under load, and judges the results by wire and log.

`python -m demo.chaos` (or `./run chaos`). The judge is pure; everything else collects evidence for it.
"""
