"""Readers of snapshots: tables, advice, reports. None of them writes to the ledger."""
