"""What demo, bench, chaos and tests share: an internet of their own, attacks, and captures at the far ends."""
