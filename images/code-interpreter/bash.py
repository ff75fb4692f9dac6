"""Starts bash_kernel without pexpect's pause of 50 ms before each line that it sends.

That pause is for programs that turn echo off to read a password; bash is started here with echo off. It would cost two
seconds at the start of the kernel, and a second for twenty lines of code.
"""

from typing import Any

import pexpect
from ipykernel.kernelapp import IPKernelApp


class Spawn(pexpect.spawn):
    """A child that is written to at once."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.delaybeforesend = None


pexpect.spawn = Spawn

from bash_kernel.kernel import BashKernel  # noqa: E402 - it takes what pexpect.spawn is now

if __name__ == "__main__":
    IPKernelApp.launch_instance(kernel_class=BashKernel)
