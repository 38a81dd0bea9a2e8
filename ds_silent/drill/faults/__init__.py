"""What the drill does wrong: a catalogue of faults, and how each is done. No framework here."""
