"""Compiles policies for hostd: `python -m policy.compiler CONFIG.json`, SALLYPORT_CONTROL_FD set.

hostd decides what a worker enforces and must not parse what callers or the operator wrote; `serve` reads what callers
write and must not decide. So this process, under a user of its own, reads the operator's file and compiles selections.

- The file is looked at again at each request: a policy is never compiled under an older document than `serve` has seen.
- A file that can no longer be read keeps the last good document in force. Without one at the start nothing is allowed,
  until there is one.
- The compiler reports each new document to hostd, which has every policy compiled again: a tighter document does not
  wait for `serve`.
- Work is done in the event loop, one piece at a time: one that does not end is noticed, and the process replaced.
- It speaks to hostd only and ends with its channel. It holds no secret.
"""

import asyncio
import json
import logging
import os
import socket
import sys
from pathlib import Path

import wire
from policy import placeholders
from policy.api import ApiPolicyError
from policy.compile import references_of
from policy.document import PolicyDocument
from policy.load import PolicyError
from policy.operator_file import OperatorFile
from policy.rules import Ceiling
from policy.selection import Selection
from wire.api.compiler import CONTROL, Changed, Compile, CompiledText, Referenced, References
from wire.api.provided import NOTHING
from wire.api.vaultd import MOST_REFERENCES, GrantForm
from wire.frames import FrameError, close_all, encode
from wire.operations import parameters
from wire.serving import handler

CONTROL_ENV = "SALLYPORT_CONTROL_FD"
CLOSED = PolicyDocument(origin="(none)", ceiling=Ceiling(hosts=(), ports=()))
"""In force while no file could be read yet: no named policy, and callers are given nothing."""
_LONGEST_ID = 2**63
_LOOK_SECONDS = 0.5

_log = logging.getLogger("compiler")


def configured(text: str) -> OperatorFile:
    """Return the operator's file that a configuration names; with null the shipped default is in force.

    Raises:
        ValueError: the text is not exactly a configuration.
    """
    document = json.loads(text)
    if not isinstance(document, dict) or document.keys() != {"policy_file"}:
        raise ValueError("the configuration has exactly policy_file")
    path = document["policy_file"]
    if path is None:
        return OperatorFile(PolicyDocument())
    if not isinstance(path, str) or not Path(path).is_absolute():
        raise ValueError("policy_file is no absolute path")
    try:
        return OperatorFile.read(Path(path))
    except PolicyError as error:
        _log.error("nothing is allowed until the policy file can be read: %s", error)
        return OperatorFile(CLOSED, Path(path))


class Compiler:
    """Answers hostd."""

    def __init__(self, file: OperatorFile) -> None:
        self._file = file
        self._announced: PolicyDocument = CLOSED

    async def handle(
        self, _client: wire.Client, request: Compile | References, fds: list[int]
    ) -> CompiledText | Referenced:
        """Answer one request."""
        close_all(fds)
        match request:
            case Compile():
                return self._compile(request.selection, request.seed)
            case References():
                return self._references()

    async def follow(self, client: wire.Client) -> None:
        """Tell hostd of each document that comes into force, the one of the start too, until cancelled."""
        while True:
            self._file.reload()
            if self._file.document is not self._announced:
                self._announced = self._file.document
                await client.tell(Changed())
            await asyncio.sleep(_LOOK_SECONDS)

    def _references(self) -> Referenced:
        self._file.reload()
        uses = references_of(self._file.document)
        forms = dict.fromkeys(GrantForm(use.secret, use.host, use.port, str(use.scheme)) for use in uses)
        if len(forms) > MOST_REFERENCES:
            raise wire.RequestError(wire.Code.TOO_LARGE, f"more than {MOST_REFERENCES} references and hosts")
        return Referenced(tuple(forms))

    def _compile(self, text: str, seed: str) -> CompiledText:
        self._file.reload()
        try:
            selection = json.loads(text)
        except (ValueError, RecursionError):
            raise wire.RequestError(wire.Code.INVALID, "selection: not a JSON text") from None
        try:
            policy, _ = Selection.from_json(selection).compiled(self._file.document)
        except ApiPolicyError as error:
            raise wire.RequestError(wire.Code.INVALID, f"selection: {error}"[:300]) from None
        try:
            provided = placeholders.provided(policy, seed) if seed else NOTHING
        except ValueError as error:
            raise wire.RequestError(wire.Code.INVALID, f"seed: {error}"[:300]) from None
        answer = CompiledText(json.dumps(policy.to_json()), provided)
        try:
            encode({"id": _LONGEST_ID, "ok": parameters(answer)}, wire.WHOLE)
        except FrameError:
            raise wire.RequestError(wire.Code.TOO_LARGE, "the policy is too large for a gateway") from None
        return answer


async def run(control: socket.socket, file: OperatorFile) -> None:
    """Answer until the channel ends."""
    compiler = Compiler(file)
    client = await wire.serve_connection(control, handler(CONTROL, compiler.handle))
    following = asyncio.create_task(compiler.follow(client), name="follow")
    ended = asyncio.create_task(client.closed.wait(), name="ended")
    await asyncio.wait((following, ended), return_when=asyncio.FIRST_COMPLETED)  # without either it is started again
    for task in (following, ended):
        task.cancel()
    await asyncio.gather(following, ended, return_exceptions=True)


def main(arguments: list[str]) -> int:
    """Entry point: `arguments` is the one configuration path."""
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(name)s: %(levelname)s: %(message)s")
    if len(arguments) != 1:
        _log.error("usage: python -m policy.compiler CONFIG.json")
        return 64
    file = configured(Path(arguments[0]).read_text())
    control = socket.socket(fileno=int(os.environ.pop(CONTROL_ENV)))
    control.set_inheritable(False)
    asyncio.run(run(control, file))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
