"""What several subcommands have in common: exit statuses, and the settings that they use."""

import argparse

from lifecycle import running
from lifecycle.config import settings
from lifecycle.config.settings import Settings

OK, FAILED, WRONG = 0, 1, 2


def given(options: argparse.Namespace) -> Settings:
    """Return the settings that `serve` would use."""
    return settings.read(options.config, settings.environment(), options.defaults)


def configured(options: argparse.Namespace) -> Settings:
    """Return the settings of the named file, else those of the running server, else those that `serve` would use."""
    found = given(options)
    named = options.config is not None or settings.CONFIG_PATH in settings.environment()
    return found if named else running.settings_of(found)
