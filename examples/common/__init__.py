"""What several examples need."""
