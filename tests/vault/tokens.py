"""A PKCS#11 token for tests: SoftHSM, with files in a directory, and a process that makes keys in it.

A process can load a module only once, and SoftHSM reads the tokens when it is loaded. So keys are made in processes of
their own.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from vault.wrapping.sources import Pkcs11Token

MODULE = "/usr/lib/softhsm/libsofthsm2.so"
PIN, TOKEN, KEY = "482915", "sallyport", "master"
_MAKE = """
import json, os, pkcs11, sys
from pkcs11 import Attribute, KeyType
module, token, pin, made, removed = json.loads(sys.argv[1])
with pkcs11.lib(module).get_token(token_label=token).open(rw=True, user_pin=pin) as session:
    for label, bits, extractable, private in made:
        template = {Attribute.SENSITIVE: not extractable, Attribute.EXTRACTABLE: extractable}
        template[Attribute.PRIVATE] = private
        session.generate_key(KeyType.AES, bits, label=label, store=True, template=template)
    for label in removed:
        for key in list(session.get_objects({Attribute.LABEL: label})):
            key.destroy()
"""


class SoftToken:
    """SoftHSM with its tokens in `directory`, which belongs to the user `uid` if that is given."""

    def __init__(self, directory: Path, uid: int | None = None) -> None:
        self.directory, self._uid = directory, uid
        self.tokens = directory / "tokens"
        self.tokens.mkdir(parents=True)
        self._configuration = directory / "softhsm2.conf"
        self._configuration.write_text(f"directories.tokendir = {self.tokens}\nlog.level = ERROR\n")
        self.pin_file = directory / "pin"
        self.write_pin(PIN)
        self._own()

    @property
    def environment(self) -> dict[str, str]:
        """The variables that the module needs."""
        return {"SOFTHSM2_CONF": str(self._configuration)}

    @property
    def place(self) -> Pkcs11Token:
        """The key for the settings."""
        return Pkcs11Token(MODULE, TOKEN, KEY, str(self.pin_file), self.environment)

    def write_pin(self, pin: str, mode: int = 0o600) -> None:
        """Replace the file with the PIN."""
        new = self.pin_file.with_suffix(".new")
        new.write_text(f"{pin}\n")
        new.chmod(mode)
        new.replace(self.pin_file)

    def initialise(self, label: str = TOKEN) -> None:
        """Make a token."""
        command = ["softhsm2-util", "--init-token", "--free", "--label", label, "--so-pin", "73519864", "--pin", PIN]
        subprocess.run(command, env=os.environ | self.environment, check=True, capture_output=True)
        self._own()

    def make(self, label: str = KEY, bits: int = 256, *, extractable: bool = False, private: bool = True) -> None:
        """Make a key in the token."""
        self._run([(label, bits, extractable, private)], [])

    def destroy(self, label: str = KEY) -> None:
        """Remove the keys of a label."""
        self._run([], [label])

    def remove(self) -> None:
        """Remove all tokens."""
        shutil.rmtree(self.tokens)
        self.tokens.mkdir()
        self._own()

    def _run(self, made: list[tuple[str, int, bool, bool]], removed: list[str]) -> None:
        order = json.dumps([MODULE, TOKEN, PIN, made, removed])
        subprocess.run([sys.executable, "-c", _MAKE, order], env=os.environ | self.environment, check=True)
        self._own()

    def _own(self) -> None:
        if self._uid is not None:
            for path in (self.tokens, *self.tokens.rglob("*")):
                os.chown(path, self._uid, self._uid)


def ready(directory: Path, uid: int | None = None) -> SoftToken:
    """Return a token with a key."""
    token = SoftToken(directory, uid)
    token.initialise()
    token.make()
    return token
