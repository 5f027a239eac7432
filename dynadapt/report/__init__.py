"""What a migration did, as tables and pictures."""
