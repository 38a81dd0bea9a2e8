"""Exchange what each rank knows of a measured step: one collective up to 16 ranks, two above; read one step later."""
