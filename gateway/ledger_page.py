"""Maps the page of a sandbox's ledger; see `gateway.ledger`."""

import mmap
import os

from gateway.ledger import SIZE, Ledger


def map_ledger(fd: int) -> Ledger:
    """Map the file `fd`, and close it.

    Raises:
        OSError, ValueError: the file cannot be mapped, or has another size than a ledger.
    """
    try:
        if os.fstat(fd).st_size != SIZE:
            raise ValueError("a ledger is one page")
        return Ledger(mmap.mmap(fd, SIZE, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE))
    finally:
        os.close(fd)
