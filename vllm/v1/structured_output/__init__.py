"""Constraints on the output's form (JSON schema, regex, choice, grammar), by llguidance; a state per child."""
