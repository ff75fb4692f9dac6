"""Each defence switched off, alone and with all of its path, by substitution at its seam; judged at the far end.

The daemons of one Sallyport are started from `daemon`, which puts a function of its own in the place of each of those
named in `substitutes` and then runs the real main. Which of them are in force is written in a file of the run
directory by `state`. Nothing of this is in the product.
"""
