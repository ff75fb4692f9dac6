"""What happened: the tamper-evident log of every decision, its one writer (auditd), and its readers.

Producers use `audit.client`; the closed list of what a record may say is `audit.records`.
"""
