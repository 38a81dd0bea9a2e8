"""What all ranks do together, and what happens where one of them cannot."""
