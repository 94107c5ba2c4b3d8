"""What the command line starts as processes of its own; no request passes through here."""
