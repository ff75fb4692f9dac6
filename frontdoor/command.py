"""Becomes the `sallyport` command, with settings for the parts that were built here.

`./run sallyport policy check` runs often and needs nothing else, so this module imports little.
"""

import os
import shutil
import sys
from typing import TYPE_CHECKING, NoReturn

from frontdoor.places import Places

if TYPE_CHECKING:
    from frontdoor.builds import Built

# The address at which execd finds the image's Jupyter server. Its token protects nothing, because only the sandbox
# itself can reach that address.
_CODE_ENV = "{ JUPYTER_HOST = 'http://127.0.0.1:44771', JUPYTER_TOKEN = 'opensandboxcodeinterpreterjupyter' }"
_DEFAULTS_FD = 8


def settings(places: Places, built: "Built", dockerd: str, with_code: bool) -> str:
    """Return the settings for the built parts, TOML; the operator's own file overrides them, key by key."""
    code = f"  {{ name = 'sallyport/code-interpreter', tar = '{built.code_image}', env = {_CODE_ENV} }},"
    return f"""\
# Written by ./run at each start. Your own settings go into a file of yours: ./run serve --config FILE
[sallyport]
state_dir = '{places.home}/state'
run_dir = '{places.run_dir}'
python = '{places.python}'
runsc = '{built.runsc}'
execd = '{built.execd}'
images = [
  {{ name = 'sallyport/base', tar = '{built.base_image}' }},
  {{ name = 'sallyport/empty', tar = '{built.empty_image}' }},
{code if with_code else ""}
]

[sallyport.docker]
managed = true
binary = '{dockerd}'
data_root = '{places.home}/docker'
log = '{places.home}/dockerd.log'
"""


def places_only(places: Places) -> str:
    """Return the settings for the case that nothing was built: the future directories."""
    return f"[sallyport]\nstate_dir = '{places.home}/state'\nrun_dir = '{places.run_dir}'\n"


def write_built(places: Places, built: "Built") -> None:
    """Write the settings file with the paths of the built parts."""
    new = f"{places.built}.new"
    text = settings(places, built, shutil.which("dockerd") or "", os.path.isfile(built.code_image))
    with open(new, "w") as file:
        file.write(text)
    os.chmod(new, 0o644)  # commands of every user read it
    os.rename(new, places.built)


def become(places: Places, arguments: list[str]) -> NoReturn:
    """Become the command of this process's environment, in the caller's directory: users' paths are relative to it."""
    from frontdoor.steps import become as execute

    program = os.path.join(os.path.dirname(sys.executable), "sallyport")
    defaults = places.built
    if not os.access(defaults, os.R_OK):
        file = os.memfd_create("defaults")
        os.write(file, places_only(places).encode())
        os.dup2(file, _DEFAULTS_FD)
        defaults = f"/dev/fd/{_DEFAULTS_FD}"
    os.chdir(places.caller)
    execute(program, "--defaults", defaults, *arguments)
