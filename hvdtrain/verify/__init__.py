"""Verify a finished or running run: from its ledger, and by training again."""
