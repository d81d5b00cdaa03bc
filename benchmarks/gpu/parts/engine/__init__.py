"""Parts that check or time whole engines."""
