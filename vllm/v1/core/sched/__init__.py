"""The scheduler: which sequences compute how many tokens in a step, and what their new tokens mean."""
