"""Starts bash_kernel with two of its ways changed.

- pexpect pauses for 50 ms before each line that it sends. That pause is for programs that turn echo off to read a
  password; bash is started here with echo off. It would cost two seconds at the start of the kernel, and a second for
  twenty lines of code.
- After an interrupt bash_kernel waits for one prompt. Bash misses a Ctrl-C that comes while it starts a command, and
  prints two prompts when the code ended by itself in that moment; a later run would then get the output of the one
  before it. Here Ctrl-C is repeated until a prompt comes, and what bash printed is read up to a mark. The same is done
  when the interrupt comes after the code, while the kernel asks for its status.
"""

import secrets
from typing import Any

import pexpect
from ipykernel.kernelapp import IPKernelApp

AGAIN_SECONDS = 0.2


class Spawn(pexpect.spawn):
    """A child that is written to at once, and that knows that it was interrupted."""

    interrupted = False

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.delaybeforesend = None

    def sendintr(self) -> None:
        """Send Ctrl-C."""
        self.interrupted = True
        super().sendintr()


pexpect.spawn = Spawn

from bash_kernel import kernel  # noqa: E402 - it takes what pexpect.spawn is now


class Wrapper(kernel.IREPLWrapper):
    """Bash behind a terminal."""

    def _expect_prompt(self, timeout: float | None = -1) -> int:
        if self.child.interrupted:
            self._settle()
            self.child.interrupted = False
            return 0
        return int(super()._expect_prompt(timeout))

    def _settle(self) -> None:
        """Read what bash prints until it waits for a command. It may never do so: then execd ends the kernel."""
        printed = None
        while True:
            try:
                super()._expect_prompt(AGAIN_SECONDS)
                printed = self.child.before if printed is None else printed
                mark = secrets.token_hex(8)
                self.child.sendline(f"echo {mark[:8]}''{mark[8:]}")
                self.child.expect_exact(mark, timeout=AGAIN_SECONDS)
                super()._expect_prompt(AGAIN_SECONDS)
            except pexpect.TIMEOUT:
                self.child.sendintr()
            else:
                self.child.before = printed
                return


class BashKernel(kernel.BashKernel):
    """Bash, also interrupted just after the code."""

    def do_execute(
        self,
        code: str,
        silent: bool,
        store_history: bool = True,
        user_expressions: dict[str, str] | None = None,
        allow_stdin: bool = False,
    ) -> dict[str, Any]:
        """Run `code`; returns the content of an `execute_reply`. ipykernel passes what is named here, and no more."""
        try:
            done: dict[str, Any] = super().do_execute(code, silent, store_history, user_expressions, allow_stdin)
        except KeyboardInterrupt:
            self.bashwrapper.child.sendintr()
            self.bashwrapper._expect_prompt()
            done = {"status": "abort", "execution_count": self.execution_count}
        return done


kernel.IREPLWrapper = Wrapper

if __name__ == "__main__":
    IPKernelApp.launch_instance(kernel_class=BashKernel)
