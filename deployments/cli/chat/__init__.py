"""`pagoda chat`: a conversation in the terminal, streamed, with the tokens and times of each answer."""
