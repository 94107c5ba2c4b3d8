"""Native multi-token prediction: draft, verify, accept, roll back."""
