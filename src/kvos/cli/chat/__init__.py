"""``kvos chat``: a conversation in the terminal, and a look at the cache under it."""
