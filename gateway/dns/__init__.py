"""The gateway's DNS: reads and judges queries, resolves names and answers."""
