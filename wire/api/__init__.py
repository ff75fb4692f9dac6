"""What crosses a process boundary: one module for each process that is asked, one frozen dataclass for each request,
notification and answer.
"""
