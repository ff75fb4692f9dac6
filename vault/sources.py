"""Where a released value comes from: the sealed store, the sandbox's own record, or a backend.

This is the one port between a release and all of its sources. `obtain` may wait, and comes before the durable record.
`current` does not wait, and comes after the last decision: it has a value only if the value is valid at that moment.
"""

import math

from policy.references import is_reference
from vault.custody import Custody
from vault.grants import Grant
from vault.readings import Current, Readings


class Sources:
    """The sources of the secrets of all sandboxes."""

    def __init__(self, custody: Custody, readings: Readings) -> None:
        self._custody = custody
        self._readings = readings

    async def obtain(self, sandbox: str, secret: str) -> None:
        """Return when the source has a valid value.

        Raises:
            StoreError: it has none; the message has the reason.
        """
        if is_reference(secret):
            await self._readings.obtain(secret, sandbox)

    def current(self, sandbox: str, wanted: Grant) -> Current:
        """Return the value, directly after the consent of `Custody.decide`.

        Raises:
            StoreError: there is no valid value now.
        """
        former = self._custody.former(sandbox, wanted)
        if is_reference(wanted.secret):
            found = self._readings.current(wanted.secret, sandbox)
            return Current(found.value, (*former, *found.former), found.seconds)
        return Current(self._custody.value(sandbox, wanted.secret), former, math.inf)
