"""What is counted and timed, and how it is read."""
