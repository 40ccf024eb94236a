"""What people read of a tuning: its description and its page."""
