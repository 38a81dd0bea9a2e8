"""Ways in through other libraries' own extension points; each is imported only where it is used."""
