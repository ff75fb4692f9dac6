"""The subcommands of `sallyport`, a module each: `add_arguments` describes its options, `run` executes it.

`lifecycle.cli` imports the module of a command only when the command is given.
"""
