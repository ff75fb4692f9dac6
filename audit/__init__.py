"""The audit log: a tamper-evident log of every decision, its only writer (auditd), and its readers.

Producers use `audit.client`. `audit.records` has the closed list of the fields of a record.
"""
