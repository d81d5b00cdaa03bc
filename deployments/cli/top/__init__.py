"""`pagoda top`: the live view of a server in the terminal, from the same data as the web page's (GET /live)."""
