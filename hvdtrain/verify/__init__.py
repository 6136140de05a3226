"""What is proven of a run after the fact: from its ledger, and by training again."""
