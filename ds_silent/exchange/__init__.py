"""One collective per measured step: what each rank knows becomes what every rank knows, one step later."""
